"""The vocabulary matrix, cut by token id: looks ids up and, as output head, scores them."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.distributed import Communicator
from minisgl.kernel import (
    SampledTokens,
    SamplingTensors,
    best_of_part,
    best_of_parts,
    gather_embedding,
    sample,
)
from minisgl.kernel.sampling import GROUP
from minisgl.layers.shards import Placement, split_evenly


class VocabMatrix(nn.Module):
    """weight: [n, H], the rows of this rank's ids; those past the vocabulary are zero.

    Ranks hold whole groups of ids, of which one is drawn together. Tied models use one instance
    for both directions. Raises ConfigError where ranks would be left without ids.
    """

    def __init__(self, vocab_size: int, hidden_size: int, comm: Communicator) -> None:
        super().__init__()
        self.comm = comm
        rank, size = comm.tp.rank, comm.tp.size
        self.part = split_evenly("", vocab_size, rank, size, GROUP if size > 1 else 1)
        if self.part.local * (size - 1) >= vocab_size:
            raise ConfigError(f"{vocab_size} token ids cannot be split over tensor-parallel {size}")
        self.weight = nn.Parameter(torch.empty(self.part.local, hidden_size))

    def embed(self, ids: Tensor) -> Tensor:
        """ids: integers [T] below V. Returns [T, H], zeros for ids of other ranks."""
        return gather_embedding(ids, self.weight, self.part.begin)

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [N, H]. Returns [N, n] of its dtype, for the ids of this rank and its padding.

        out: [N, n] to be overwritten and returned.
        """
        return torch.mm(hidden, self.weight.t(), out=out)

    def whole(self, logits: Tensor) -> Tensor:
        """[N, n] of each rank, as `logits` returns it, to [N, V]: the same on every rank."""
        parts = self.comm.gather(logits)
        return parts.transpose(0, 1).reshape(len(logits), -1)[:, : self.part.full]

    def sample(self, logits: Tensor, params: SamplingTensors) -> SampledTokens:
        """Choose a token for each row of `logits`, float32 on CPU; the same on every rank.

        Without filters each rank offers the best of its ids; with them all gather all logits.
        """
        if self.comm.tp.size == 1 or params.filters:
            return sample(self.whole(logits), params)
        begin, end = self.part.begin, self.part.end
        offer = best_of_part(logits[:, : end - begin], params, begin)
        return best_of_parts(self.comm.gather(offer), params)

    def placements(self, name: str) -> Iterator[Placement]:
        part = self.part
        shape = (part.full, self.weight.shape[1])
        yield Placement(f"{name}.weight", shape, f"{name}.weight", 0, part.begin, part.end)
