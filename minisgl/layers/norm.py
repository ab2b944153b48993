"""RMSNorm as modules: the parameters, and the norm on the residual stream."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.distributed import Communicator
from minisgl.layers.shards import Placement


class RMSNorm(nn.Module):
    """weight: [size], whole on every rank. Heads are normed by a kernel that does more."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def placements(self, name: str) -> Iterator[Placement]:
        yield Placement(f"{name}.weight", tuple(self.weight.shape), f"{name}.weight")


class StreamNorm(RMSNorm):
    """Where layers meet: sums what the ranks computed in parts, adds it to the stream, norms."""

    def __init__(self, size: int, eps: float, comm: Communicator) -> None:
        super().__init__(size, eps)
        self.comm = comm

    def forward(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See Communicator.reduce_norm. x: this rank's part of the sum, [T, size]."""
        return self.comm.reduce_norm(x, residual, self.weight, self.eps)
