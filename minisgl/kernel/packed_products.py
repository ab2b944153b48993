"""Products of activations with 4-bit weights, as linear layers call them.

On a GPU, our kernels multiply bfloat16 activations of up to MOST_ROWS rows, or MOST_LOADING_ROWS of
them on Hopper (packed_tilings.py). With more rows, the weights are dequantised in parts for torch's
product. CPU tensors, and all other products, run the reference: the weights are dequantised for the
call.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel.dispatch import apply_norm, silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.packed_order import OrderedWeights, has_order, in_order
from minisgl.kernel.packed_tilings import (
    MOST_LOADING_ROWS,
    MOST_ROWS,
    loading_tile_for,
    packed_tile_for,
)
from minisgl.kernel.packed_weights import PackedWeights, dequantise
from minisgl.kernel.slow import log_slow

_MOST_FUSED_ROWS: Final = 16  # of products that apply a norm, or add to the residual stream
_PART_BYTES: Final = 64 << 20  # of dequantised weights at once, about
# The rows of a part are a multiple of this. A part computes as many columns of `out`, and the fast
# kernels of cuBLAS need the address of these columns to be a multiple of 16 bytes.
_PART_ROWS: Final = 256


def prepare(weights: PackedWeights, dtype: torch.dtype) -> PackedWeights | OrderedWeights:
    """Return the weights as the kernels read them, if a kernel multiplies `dtype` with them."""
    columns = 2 * weights.codes.shape[-1]
    if weights.codes.is_cpu:
        return weights
    if dtype != torch.bfloat16 or not has_order(weights.kind, weights.group, columns):
        case = "%s weights with groups of %d columns and activations of %s"
        log_slow(case, weights.kind, weights.group, dtype)
        return weights
    return in_order(weights)


def packed_linear(
    x: Tensor,
    weights: PackedWeights | OrderedWeights,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
    gated: bool = False,
) -> Tensor:
    """Return x @ weights.T + bias, a new [T, N] of x's dtype.

    x: [T, K], bfloat16 if the weights are ordered. bias: [N] of x's dtype. semaphores and gated: as
    in dispatch.linear; without semaphores, K is not split. norm: if given, x is normalised first,
    and then multiplied by norm_weight [K].
    """
    x, norm = _normed(x, weights, norm, norm_weight)
    if isinstance(weights, PackedWeights):
        out = functional.linear(x, dequantise(weights, x.dtype), bias)
    elif 0 < len(x) <= _most_rows(weights):
        return _by_kernel(x, weights, bias, semaphores, gated, norm)
    else:
        out = _by_torch(x, weights, bias)
    return silu_and_mul(out) if gated else out


def packed_add_linear(
    residual: Tensor,
    x: Tensor,
    weights: PackedWeights | OrderedWeights,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
    next_weight: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Add `packed_linear` to residual [T, N].

    next_weight: [N], the weight of the norm that follows, or None. Returns (the sum, None, its
    squares and the sum times next_weight as in PendingNorm) if our kernel adds in place, and else
    (the product, residual, None, None).
    """
    if isinstance(weights, PackedWeights) or not _fuses(x, weights):
        return packed_linear(x, weights, bias, semaphores), residual, None, None
    from minisgl.kernel.triton import packed_tiles

    tile = loading_tile_for(len(x), weights.height)
    given = _aligned(x), weights, bias, semaphores, tile, next_weight
    total, squares, scaled = packed_tiles.add_linear(residual, *given)
    return total, None, squares, scaled


def _normed(
    x: Tensor,
    weights: PackedWeights | OrderedWeights,
    norm: PendingNorm | None,
    norm_weight: Tensor | None,
) -> tuple[Tensor, PendingNorm | None]:
    """Return the operand of the product, and the norm if our kernel applies it."""
    if norm is None:
        assert norm_weight is None, "the weight of a norm comes without the norm; this is a bug"
        return x, None
    if norm.squares is not None and norm.scaled is not None and _fuses(x, weights):
        return norm.scaled, norm
    return apply_norm(x, norm, norm_weight), None


def _fuses(x: Tensor, weights: PackedWeights | OrderedWeights) -> bool:
    """Whether our kernel applies a norm before the product, or adds after it."""
    is_few = 0 < len(x) <= _MOST_FUSED_ROWS
    return is_few and isinstance(weights, OrderedWeights) and _has_loading_kernel(weights)


def _aligned(x: Tensor) -> Tensor:
    """Return x, or a copy of it. The kernels load 16 bytes at once."""
    aligned = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if aligned else x.contiguous()


def _most_rows(weights: OrderedWeights) -> int:
    """The most rows of x that a kernel multiplies with the weights."""
    return MOST_LOADING_ROWS if _has_loading_kernel(weights) else MOST_ROWS


def _has_loading_kernel(weights: OrderedWeights) -> bool:
    from minisgl.kernel.triton.overlap import is_hopper

    if not is_hopper():
        return False
    from minisgl.kernel.triton import packed_tiles

    return packed_tiles.takes(weights)


def _by_kernel(
    x: Tensor,
    weights: OrderedWeights,
    bias: Tensor | None,
    semaphores: Tensor | None,
    gated: bool,
    norm: PendingNorm | None,
) -> Tensor:
    from minisgl.kernel.triton import packed_linear as kernels
    from minisgl.kernel.triton.overlap import has_large_tiles

    x = _aligned(x)
    if _has_loading_kernel(weights):
        from minisgl.kernel.triton import packed_tiles

        tile = loading_tile_for(len(x), weights.height)
        return packed_tiles.linear(x, weights, bias, semaphores, tile, gated, norm=norm)
    tile = packed_tile_for(len(x), weights.height, has_large_tiles())
    return kernels.linear(x, weights, bias, semaphores, tile, gated)


def _by_torch(x: Tensor, weights: OrderedWeights, bias: Tensor | None) -> Tensor:
    from minisgl.kernel.triton import packed_linear as kernels

    out = x.new_empty((len(x), weights.height))
    for first, end in parts_of(weights.height, weights.columns):
        part = kernels.dequantise(weights, x.dtype, first, end)
        torch.mm(x, part.t(), out=out[:, first:end])
        del part  # or two parts would be in memory at once
    return out if bias is None else out.add_(bias)


def parts_of(height: int, columns: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the end row of each part of a matrix that is dequantised at once.

    The parts have about _PART_BYTES of bfloat16 weights and equally many rows, apart from the last.
    """
    count = max(round(2 * height * columns / _PART_BYTES), 1)
    step = -(-height // (count * _PART_ROWS)) * _PART_ROWS
    for first in range(0, height, step):
        yield first, min(first + step, height)
