"""Quantisation of activations to FP8, alone or fused with the operations before it.

A program computes one row: a residual addition, an RMSNorm or SiLU-and-mul if asked, then the
largest number of the row or of each group of 128, and the quotients. The rows are read once. A row
consists of equal chunks, so that a width which is not a power of two wastes few threads.

Bytes: 2 K for each row (4 K with SiLU-and-mul, 6 K with a residual addition), and K plus the scales
written.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float8_e4m3fn, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_tilings import GROUP
from minisgl.kernel.triton.fp8 import magnitude
from minisgl.kernel.triton.overlap import overlaps

_CHUNKS = 3  # of a row; more if the chunks would be longer than _LONGEST
_LONGEST = 4096
_ELEMENTS_PER_THREAD = 8  # of a chunk


@triton.jit
def _scale_and_inverse(most):
    """The scale of vectors, and its inverse. most: the largest `magnitude` of each vector.

    The scale of a vector with NaN or infinity is NaN, so that products with it are NaN too.
    """
    largest = most.to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(largest, tl.zeros_like(largest) + 448.0), 1e-12)
    scale = tl.where(most < 0x7F800000, scale, float("nan"))
    return scale, tl.div_rn(tl.zeros_like(scale) + 1.0, scale)


@triton.jit(do_not_specialize=["scale_stride", "eps"])
def _quantise(
    x,
    addend,
    norm_weight,
    out,
    scales,
    x_stride,
    addend_stride,
    scale_stride,
    width,
    eps,
    ADDED: tl.constexpr,
    NORM: tl.constexpr,
    WEIGHTED: tl.constexpr,
    GATED: tl.constexpr,
    GROUPED: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One row of CHUNKS chunks, each of GROUPS groups of GROUP columns.

    GROUPED: each group gets a scale; otherwise the row gets one. scale_stride: the distance between
    the scales of neighbouring groups.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * x_stride
    first = tl.arange(0, GROUPS)
    columns = first[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    factors = tl.tuple(())
    if OVERLAP:
        gdc_launch_dependents()
    if WEIGHTED:
        for i in tl.static_range(CHUNKS):
            at = columns + i * (GROUPS * GROUP)
            factors += (tl.load(norm_weight + at, mask=at < width, other=0.0),)
    if OVERLAP:
        gdc_wait()
    stored = tl.tuple(())
    for i in tl.static_range(CHUNKS):
        at = columns + i * (GROUPS * GROUP)
        value = tl.load(x_row + at, mask=at < width, other=0.0)
        if ADDED:
            more = tl.load(addend + row * addend_stride + at, mask=at < width, other=0.0)
            value = (value.to(tl.float32) + more.to(tl.float32)).to(value.dtype)
            tl.store(x_row + at, value, mask=at < width)
        if GATED:
            gate = value.to(tl.float32)
            up = tl.load(x_row + width + at, mask=at < width, other=0.0).to(tl.float32)
            gate = (gate / (1.0 + tl.exp(-gate))).to(value.dtype).to(tl.float32)
            value = (gate * up).to(value.dtype)
        stored += (value,)
    if NORM:
        squares = tl.zeros([GROUPS, GROUP], tl.float32)
        for i in tl.static_range(CHUNKS):
            wide = stored[i].to(tl.float32)
            squares += wide * wide
        root = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / width + eps)
    values = tl.tuple(())
    # tl.max drops NaN. The bits of the magnitudes keep it.
    peaks = tl.zeros([GROUPS, GROUP], tl.int32)
    for i in tl.static_range(CHUNKS):
        value = stored[i]
        if NORM:
            value = (value.to(tl.float32) * root).to(value.dtype)
        if WEIGHTED:
            value = (value.to(tl.float32) * factors[i].to(tl.float32)).to(value.dtype)
        values += (value,)
        if not GROUPED:
            peaks = tl.maximum(peaks, magnitude(value))
    if not GROUPED:
        scale, inverse = _scale_and_inverse(tl.max(peaks, axis=1))
        tl.store(scales + row + first, scale)
    for i in tl.static_range(CHUNKS):
        at = columns + i * (GROUPS * GROUP)
        value = values[i].to(tl.float32)
        if GROUPED:
            scale, inverse = _scale_and_inverse(tl.max(magnitude(value), axis=1))
            group = first + i * GROUPS
            scale_at = scales + row + group * scale_stride
            tl.store(scale_at, scale, mask=group < tl.cdiv(width, GROUP))
        # A quotient, rounded correctly (Markstein 1990): the remainder corrects the product. A
        # quotient exceeds 448 by a rounding error at most, and e4m3 rounds it to 448.
        quotient = value * inverse[:, None]
        rest = tl.fma(-quotient, tl.broadcast_to(scale[:, None], [GROUPS, GROUP]), value)
        quotient = tl.fma(rest, tl.broadcast_to(inverse[:, None], [GROUPS, GROUP]), quotient)
        tl.store(out + row * width + at, quotient.to(out.dtype.element_ty), mask=at < width)


def quantise_rows(
    x: Tensor,
    grouped: bool,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """As fp8_products.quantise_rows.

    x: unit stride in the last dimension, as that of an addend. The rows of the results are padded
    to a multiple of 4, which torch's products need; padded rows are undefined.
    """
    num_rows, width = x.shape
    width = width // 2 if gated else width
    padded = -(-num_rows // 4) * 4
    chunk = max(triton.next_power_of_2(triton.cdiv(width, _CHUNKS)), GROUP)
    chunk = min(chunk, _LONGEST)
    group = GROUP if grouped else chunk
    out = x.new_empty((padded, width), dtype=float8_e4m3fn)
    scales = x.new_empty((triton.cdiv(width, group) if grouped else 1, padded), dtype=float32)
    if num_rows == 0:
        return out, scales.t()
    overlap, addend = overlaps(), None if norm is None else norm.addend
    _quantise[(num_rows,)](
        x,
        addend,
        x if norm_weight is None else norm_weight,
        out,
        scales,
        x.stride(0),
        0 if addend is None else addend.stride(0),
        padded,
        width,
        0.0 if norm is None else norm.eps,
        ADDED=addend is not None,
        NORM=norm is not None,
        WEIGHTED=norm_weight is not None,
        GATED=gated,
        GROUPED=grouped,
        CHUNKS=triton.cdiv(width, chunk),
        GROUPS=chunk // group,
        GROUP=group,
        OVERLAP=overlap,
        num_warps=max(chunk // (32 * _ELEMENTS_PER_THREAD), 1),
        launch_pdl=overlap,
    )
    return out, scales.t()
