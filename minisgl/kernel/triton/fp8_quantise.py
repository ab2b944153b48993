"""Quantisation of activations to FP8, alone or fused with the operation before it.

A program computes one row: an RMSNorm or SiLU-and-mul if asked, then the largest number of the row
or of each group of 128, and the quotients. The rows are read once.

Bytes: 2 K for each row (4 K with SiLU-and-mul), and K plus the scales written.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float8_e4m3fn, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.fp8_tilings import GROUP
from minisgl.kernel.triton.fp8 import magnitude
from minisgl.kernel.triton.overlap import overlaps

_ELEMENTS_PER_THREAD = 16


@triton.jit(do_not_specialize=["scale_stride", "eps"])
def _quantise(
    x,
    norm_weight,
    out,
    scales,
    x_stride,
    scale_stride,
    width,
    eps,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATED: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row. GROUPS groups of GROUP columns cover the row; each gets a scale.

    The scale of a group with NaN or infinity is NaN, so that the product is NaN too.
    scale_stride: the distance between the scales of neighbouring groups.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    cols = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = cols < width
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    stored = tl.load(x + row * x_stride + cols, mask=inside, other=0.0)
    value = stored.to(tl.float32)
    if NORM:
        mean = tl.sum(tl.sum(value * value, axis=1), axis=0) / width
        value = (value * tl.rsqrt(mean + eps)).to(stored.dtype).to(tl.float32)
    if WEIGHTED:
        factor = tl.load(norm_weight + cols, mask=inside, other=0.0).to(tl.float32)
        value = (value * factor).to(stored.dtype).to(tl.float32)
    if GATED:
        up = tl.load(x + row * x_stride + width + cols, mask=inside, other=0.0).to(tl.float32)
        value = (value / (1.0 + tl.exp(-value))).to(stored.dtype).to(tl.float32)
        value = (value * up).to(stored.dtype).to(tl.float32)
    # tl.max and the limits of the quotient drop NaN. The bits of the magnitudes keep it.
    most = tl.max(magnitude(value), axis=1)
    largest = most.to(tl.float32, bitcast=True)
    # Both divisions round correctly, as the reference does.
    scale = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + 448.0), 1e-12)
    scale = tl.where(most < 0x7F800000, scale, float("nan"))
    quotient = tl.div_rn(value, tl.zeros_like(value) + scale[:, None])
    quotient = tl.minimum(tl.maximum(quotient, -448.0), 448.0)
    tl.store(out + row * width + cols, quotient.to(out.dtype.element_ty), mask=inside)
    kept = group < tl.cdiv(width, GROUP)
    tl.store(scales + row + group * scale_stride, scale, mask=kept)


def quantise_rows(
    x: Tensor,
    grouped: bool,
    eps: float | None = None,
    norm_weight: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """As fp8_products.quantise_rows.

    x: unit stride in the last dimension. The rows of the results are padded to a multiple of 4,
    which torch's products need; padded rows are undefined.
    """
    num_rows, width = x.shape
    width = width // 2 if gated else width
    padded = -(-num_rows // 4) * 4
    block = triton.next_power_of_2(width)
    group = min(GROUP, block) if grouped else block
    groups = -(-width // group)
    out = x.new_empty((padded, width), dtype=float8_e4m3fn)
    scales = x.new_empty((groups, padded), dtype=float32)
    if num_rows == 0:
        return out, scales.t()
    overlap = overlaps()
    _quantise[(num_rows,)](
        x,
        x if norm_weight is None else norm_weight,
        out,
        scales,
        x.stride(0),
        padded,
        width,
        0.0 if eps is None else eps,
        NORM=eps is not None,
        WEIGHTED=norm_weight is not None,
        GATED=gated,
        GROUPS=block // group,
        GROUP=group,
        OVERLAP=overlap,
        num_warps=min(max(block // (32 * _ELEMENTS_PER_THREAD), 1), 16),
        launch_pdl=overlap,
    )
    return out, scales.t()
