"""The vocabulary matrix, cut by token id: looks ids up and, as output head, scores them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from minisgl.distributed import Communicator
from minisgl.kernel import gather_embedding
from minisgl.layers.shards import Placement, split_evenly


class VocabMatrix(nn.Module):
    """weight: [ceil(V / ranks), H]; rows past the vocabulary are zero and never seen outside.

    Tied models use one instance for both directions.
    """

    def __init__(self, vocab_size: int, hidden_size: int, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        self.part = split_evenly("", vocab_size, comm.tp.rank, comm.tp.size)
        self.weight = nn.Parameter(torch.empty(self.part.local, hidden_size))

    def embed(self, ids: Tensor) -> Tensor:
        """ids: integers [T] below V. Returns [T, H], zeros for ids of other ranks."""
        return gather_embedding(ids, self.weight, self.part.begin)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [N, H]. Returns [N, V] of its dtype, the same on every rank.

        out: [N, V] to be overwritten and returned.
        """
        if self.comm.tp.size == 1 and out is not None:
            return torch.mm(hidden, self.weight.t(), out=out)
        return self.comm.gather_columns(linear(hidden, self.weight), self.part.full, out)

    def placements(self, name: str) -> Iterator[Placement]:
        part = self.part
        shape = (part.full, self.weight.shape[1])
        yield Placement(f"{name}.weight", shape, f"{name}.weight", 0, part.begin, part.end)
