"""LayerNorm after adding to the residual stream, for image encoders.

A program reads one row once. Memory traffic: 4 N H elements, and it is bound by it.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from functools import partial

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device

_ELEMENTS_PER_THREAD = 16


@triton.jit
def _add_norm(x, residual, weight, bias, out, total, width, eps, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0).to(tl.int64) * width, tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + row + cols, mask=inside, other=0.0)
    carried = tl.load(residual + row + cols, mask=inside, other=0.0)
    value = (value.to(tl.float32) + carried.to(tl.float32)).to(value.dtype)
    tl.store(total + row + cols, value, mask=inside)
    wide = value.to(tl.float32)
    centred = tl.where(inside, wide - tl.sum(wide, axis=0) / width, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    normed *= tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    normed += tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + cols, normed.to(value.dtype), mask=inside)


_launcher = Launcher(_add_norm, current_device)


def _constants(width: int) -> Constants:
    block = 1 << (width - 1).bit_length()
    warps = min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), 16)
    return Constants({"BLOCK": block}, {"num_warps": warps})


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As the reference. x and residual must be contiguous. Returns two new tensors."""
    num_rows, width = x.shape
    out, total = x.new_empty(2, num_rows, width)
    if num_rows:
        tensors = x, residual, weight, bias, out, total
        _launcher((num_rows,), tensors, (width,), (eps,), (), partial(_constants, width))
    return out, total
