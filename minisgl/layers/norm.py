"""The residual stream, and RMSNorm as modules: the parameters, and the norm on the stream."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minisgl.distributed import Communicator
from minisgl.layers.shards import Placement


class Stream(NamedTuple):
    """The residual stream between two blocks: the sum of all ranks' x, plus residual. [T, size].

    One rank's blocks add to the stream themselves: then it is x alone.
    """

    x: Tensor
    residual: Tensor | None = None


class RMSNorm(nn.Module):
    """weight: [size], whole on every rank. Heads are normed by a kernel that does more."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def placements(self, name: str) -> Iterator[Placement]:
        yield Placement(f"{name}.weight", tuple(self.weight.shape), f"{name}.weight")


class StreamNorm(RMSNorm):
    """Where blocks meet: makes the stream whole and norms it."""

    def __init__(self, size: int, eps: float, comm: Communicator) -> None:
        super().__init__(size, eps)
        self.comm = comm

    def forward(self, stream: Stream) -> tuple[Tensor, Tensor]:
        """What the next block reads, and the residual that it gives on. See reduce_norm."""
        return self.comm.reduce_norm(*stream, self.weight, self.eps)
