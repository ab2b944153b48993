"""RMSNorm: alone, after adding to the residual stream, and in a kernel that multiplies its result.

A program reads its rows once. Memory traffic: rms_norm 2 T H elements, add_rms_norm 4 T H; both are
bound by it. normed_linear has a program for each element of a product of few rows and few columns.
Each program normalises the whole row of x for itself.
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
_COLUMNS_PER_WARP = 2048  # of a program of _normed_product


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


@triton.jit
def normalise(
    v,
    scale,
    x,
    addend,
    total,
    normed,
    k,
    row,
    width,
    addend_stride,
    eps,
    stores,
    ADDED: tl.constexpr,
):
    """Return row `row` of x plus addend after the norm, rounded to x's dtype, as float32 [BLOCK].

    v: the row of x, float32. scale: the weight of the norm. k: all columns; v and scale are 0 from
    `width` on. ADDED: whether there is an addend. stores: whether this program stores the sum in
    `total`, if there is an addend, and the result in `normed`.
    """
    inside = k < width
    TYPE: tl.constexpr = x.dtype.element_ty
    if ADDED:
        more = tl.load(addend + row * addend_stride + k, mask=inside, other=0.0)
        v = (v + more.to(tl.float32)).to(TYPE).to(tl.float32)
        tl.store(total + row * width + k, v.to(TYPE), mask=inside & stores)
    v *= tl.rsqrt(tl.sum(v * v, axis=0) / width + eps)
    rounded = (v * scale.to(tl.float32)).to(TYPE)
    tl.store(normed + row * width + k, rounded, mask=inside & stores)
    return rounded.to(tl.float32)


@triton.jit(do_not_specialize=["eps"])
def _normed_product(
    x, norm_weight, weight, normed, out, width, x_stride, eps, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One element of the product. The program of its first column stores the row after the norm."""
    n, row = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, BLOCK)
    inside = k < width
    if OVERLAP:
        gdc_launch_dependents()
    w = tl.load(weight + n * width + k, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(norm_weight + k, mask=inside, other=0.0)
    if OVERLAP:
        gdc_wait()
    v = tl.load(x + row * x_stride + k, mask=inside, other=0.0).to(tl.float32)
    v = normalise(v, scale, x, x, normed, normed, k, row, width, 0, eps, n == 0, False)
    value = tl.sum(w * v, axis=0)
    tl.store(out + row * tl.num_programs(0) + n, value.to(out.dtype.element_ty))


_launcher = Launcher(_norm, current_device)
_product_launcher = Launcher(_normed_product, current_device)


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


def normed_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """As dispatch.normed_linear, without an addition before the norm.

    x: [T, K], unit stride in K, T > 0. weight: contiguous [N, K].
    """
    (num_rows, width), height = x.shape, len(weight)
    normed, out = x.new_empty(x.shape), x.new_empty((num_rows, height))
    _product_launcher(
        (height, num_rows),
        (x, norm_weight, weight, normed, out),
        (width, x.stride(0)),
        (eps,),
        (),
        partial(_product_constants, width),
    )
    return normed, out


def _product_constants(width: int) -> Constants:
    block, overlap = triton.next_power_of_2(width), overlaps()
    options = {"num_warps": max(block // _COLUMNS_PER_WARP, 1), "launch_pdl": overlap}
    return Constants({"BLOCK": block, "OVERLAP": overlap}, options)
