"""RMSNorm, alone or after adding to the residual stream.

A program reads its rows once. Memory traffic: rms_norm 2 T H elements, add_rms_norm 4 T H; both are
bound by it.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_ELEMENTS_PER_THREAD = 8
_SMALLEST_TILE = 1024


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    x,
    residual,
    weight,
    out,
    x_stride,
    residual_stride,
    out_stride,
    width,
    num_rows,
    eps,
    ADD: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    inside = cols < width
    mask = (rows < num_rows)[:, None] & inside[None, :]
    if SCALE:
        scale = tl.load(weight + cols, mask=inside, other=0.0)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + rows[:, None] * x_stride + cols[None, :], mask=mask, other=0.0)
    if ADD:
        at = residual + rows[:, None] * residual_stride + cols[None, :]
        carried = tl.load(at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + carried.to(tl.float32)).to(value.dtype)
        tl.store(at, value, mask=mask)
    wide = value.to(tl.float32)
    mean = tl.sum(wide * wide, axis=1) / width
    normed = wide * tl.rsqrt(mean + eps)[:, None]
    if SCALE:
        normed = normed * scale.to(tl.float32)[None, :]
    at = out + rows[:, None] * out_stride + cols[None, :]
    tl.store(at, normed.to(value.dtype), mask=mask)


_launcher = Launcher(_norm, current_device)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, eps: float
) -> None:
    """Launch the kernel. x, residual, out: [N, H] with a contiguous last dimension."""
    num_rows, width = x.shape
    if num_rows == 0:
        return
    other = x if residual is None else residual
    variant = residual is not None, weight is not None
    rows, _ = _tile(width)
    _launcher(
        (-(-num_rows // rows),),
        (x, other, x if weight is None else weight, out),
        (x.stride(0), other.stride(0), out.stride(0), width),
        (num_rows, eps),
        variant,
        partial(_constants, width, *variant),
    )


def _tile(width: int) -> tuple[int, int]:
    """Return the number of rows for each program, and the width rounded up to a power of two."""
    block = 1 << (width - 1).bit_length()
    return max(1, _SMALLEST_TILE // block), block


def _constants(width: int, add: bool, scale: bool) -> Constants:
    rows, block = _tile(width)
    warps = min(max(rows * block // (32 * _ELEMENTS_PER_THREAD), 1), 16)
    overlap = overlaps()
    values = {"ADD": add, "SCALE": scale, "ROWS": rows, "BLOCK": block, "OVERLAP": overlap}
    return Constants(values, {"num_warps": warps, "launch_pdl": overlap})


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """As the reference. x: [..., H]; H above 8192 is slower. Returns a new tensor."""
    out = x.new_empty(x.shape)
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1])
    _launch(rows, None, weight, out.view(rows.shape), eps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As the reference, in place: overwrites x and residual and returns both."""
    _launch(x, residual, weight, x, eps)
    return x, residual
