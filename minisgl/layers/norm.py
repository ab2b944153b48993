"""RMSNorm, and the residual stream between the blocks of a decoder layer."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minisgl.distributed.comm import Communicator
from minisgl.kernel.dispatch import rms_norm
from minisgl.kernel.elementwise import PendingNorm
from minisgl.layers.shards import Placement, Shard


class ResidualStream(NamedTuple):
    """The hidden states [T, H] between two blocks, as parts that are not added up yet.

    The hidden states are the sum of x over all ranks, plus residual. On one rank residual is None
    if the block has added its output to the stream itself.

    squares, scaled: as in PendingNorm, if the last block computed them.
    """

    x: Tensor
    residual: Tensor | None = None
    squares: Tensor | None = None
    scaled: Tensor | None = None


class BlockInput(NamedTuple):
    """The input of an attention or MLP block: x [T, H].

    norm: None if x is normalised. Otherwise the block's first linear applies this norm to x.
    """

    x: Tensor
    norm: PendingNorm | None = None


class RMSNorm(nn.Module):
    """The parameters of a norm. weight: the elements of `shard`.

    Attention reads the weights of its head norms here and passes them to a fused kernel. A norm of
    each head has head_dim elements; a norm over the whole width has those of this rank's heads.

    offset: the checkpoint stores weight - 1 (Gemma). The loader adds the 1.
    """

    def __init__(self, shard: Shard, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.shard = shard
        self.eps = eps
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(shard.local))

    def placements(self, name: str) -> Iterator[Placement]:
        shard, name = self.shard, f"{name}.weight"
        cut, convert = (0, shard.begin, shard.end), _plus_one if self.offset else None
        yield Placement(name, (shard.full,), name, *cut, order=shard.order, convert=convert)


class UnweightedNorm(RMSNorm):
    """A norm without weights in the checkpoint. The kernels read ones."""

    initial = 1.0

    def placements(self, name: str) -> Iterator[Placement]:
        yield from ()


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1


class ResidualNorm(RMSNorm):
    """The norm before a block: adds up the residual stream and normalises it.

    folded: the weight has moved into the next linear (`fold_with`) and is all ones here.
    """

    def __init__(self, size: int, eps: float, comm: Communicator, offset: bool = False) -> None:
        super().__init__(Shard("", size, 0, size), eps, offset)
        self.comm = comm
        self.folded = False

    def forward(self, stream: ResidualStream) -> tuple[BlockInput, Tensor]:
        """Return the input of the next block, and the residual to which that block adds its output.

        If the norm is folded, this launches no kernel: the first linear of the block computes the
        sum in `residual` and applies the norm. For the residual see Communicator.reduce_norm.
        """
        x, residual, squares, scaled = stream
        if self.folded and residual is None:
            return BlockInput(x, PendingNorm(self.eps, squares, scaled=scaled)), x
        if self.folded and residual is not None:
            return BlockInput(residual, PendingNorm(self.eps, addend=x)), residual
        normed, total = self.comm.reduce_norm(x, residual, self.weight, self.eps)
        return BlockInput(normed), total

    def of_sum(self, x: Tensor) -> Tensor:
        """Return the norm of the sum of all ranks' x [T, H], valid until the next sum."""
        return self.comm.reduce_norm(x, None, self.weight, self.eps)[0]

    def fold_with(self, fold: Callable[[Tensor], bool]) -> None:
        """Move the weight into the linear that reads this norm's output, if its method can.

        fold: LinearMethod.fold of that linear, which must be the only reader. For one rank only:
        with several ranks, the norm's kernel also adds up the parts of all ranks.
        """
        if fold(self.weight):
            self.weight.fill_(1.0)
            self.folded = True


def norm_all_heads(
    parts: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], eps: float, comm: Communicator
) -> None:
    """Normalise queries and keys, each over the heads of all ranks, in place (OLMo 2).

    parts: the queries [T, Hq * D] and the keys [T, Hkv * D] of this rank. weights: [Hq * D],
    [Hkv * D]. Ranks that share a key head have the same squares, so their mean is right too.
    """
    wide = [part.float() for part in parts]
    squares = torch.cat([part.square().mean(-1, keepdim=True) for part in wide], dim=1)
    factors = torch.rsqrt(comm.gather(squares).mean(0) + eps)
    for i, weight in enumerate(weights):
        parts[i].copy_(wide[i] * factors[:, i : i + 1] * weight)


class CompleteNorm(ResidualNorm):
    """The norm of a stream of which every rank holds the complete sum. It exchanges no data."""

    def forward(self, stream: ResidualStream) -> tuple[BlockInput, Tensor]:
        return BlockInput(rms_norm(stream.x, self.weight, self.eps)), stream.x
