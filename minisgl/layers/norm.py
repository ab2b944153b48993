"""The residual stream, and RMSNorm as modules: the parameters, and the norm on the stream."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minisgl.distributed import Communicator
from minisgl.kernel import PendingNorm
from minisgl.layers.shards import Placement


class Stream(NamedTuple):
    """The residual stream between two blocks: the sum of all ranks' x, plus residual. [T, size].

    One rank's blocks add to the stream themselves: then it is x alone, and they may leave its
    squares, as in PendingNorm.
    """

    x: Tensor
    residual: Tensor | None = None
    squares: Tensor | None = None


class Normed(NamedTuple):
    """What a block reads: x, [T, size], normed; or not yet, by `norm`."""

    x: Tensor
    norm: PendingNorm | None = None


class RMSNorm(nn.Module):
    """weight: [size], whole on every rank. Heads are normed by a kernel that does more."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def placements(self, name: str) -> Iterator[Placement]:
        yield Placement(f"{name}.weight", tuple(self.weight.shape), f"{name}.weight")


class StreamNorm(RMSNorm):
    """Where blocks meet: makes the stream whole and norms it, or leaves that to a product.

    folded: the weight is all ones, for the products that follow hold it.
    """

    def __init__(self, size: int, eps: float, comm: Communicator) -> None:
        super().__init__(size, eps)
        self.comm = comm
        self.folded = False

    def forward(self, stream: Stream) -> tuple[Normed, Tensor]:
        """What the next block reads, and the residual that it gives on. See reduce_norm."""
        x, residual, squares = stream
        if self.folded and residual is None:
            return Normed(x, PendingNorm(self.eps, squares)), x
        normed, total = self.comm.reduce_norm(x, residual, self.weight, self.eps)
        return Normed(normed), total

    def fold_into(self, weight: Tensor) -> None:
        """Move the norm's weight into that of the one linear that reads what is normed, in place.

        One rank only: over several the norm is where ranks meet.
        """
        weight.mul_(self.weight)
        self.weight.fill_(1.0)
        self.folded = True
