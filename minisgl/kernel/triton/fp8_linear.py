"""x @ weight.T for few rows with FP8 weights, fused with the norm before and the sum or SiLU after.

The kernel reads e4m3 weights, converts them to bfloat16 in registers, which is exact, and
multiplies them with bfloat16 activations. The activations are not quantised. With one scale for
each row of the weight, the scale multiplies the result. With blocks, the scale multiplies the
partial sum of each step over K. The weight of a norm before the product multiplies the converted
weights; the result is rounded to bfloat16, as a norm that is folded into bfloat16 weights is.

Tiles, split-K, prefetching and the sums of squares are those of linear.py.

Bytes: N K of the weight, 4 N K / (rows * columns of a block) of the scales, 2 M K of x per tile of
the weight (from L2), and 8 M N per split.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, bfloat16, float32
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_weights import Scales
from minisgl.kernel.tilings import LOWEST_TILE, Tiling
from minisgl.kernel.triton.linear import _prefetch
from minisgl.kernel.triton.overlap import overlaps


@triton.jit
def widen(stored, TYPE: tl.constexpr, FAST: tl.constexpr):
    """e4m3 to TYPE, exactly.

    FAST, for bfloat16 only: integer instructions convert four numbers at once, and NaN becomes 480.
    The 4 bits of the exponent move to the low bits of bfloat16's exponent, and a product with 2^120
    corrects the bias, also of subnormal numbers. Triton's own conversion takes the hardware's
    conversion unit, whose rate would limit the bandwidth.
    """
    if FAST:
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, scale;
            mov.b32 scale, 0x7b807b80;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 c, a, 0x80008000, c, 0xea;
            lop3.b32 d, b, 0x80008000, d, 0xea;
            mul.rn.bf16x2 $0, c, scale;
            mul.rn.bf16x2 $1, d, scale;
            }
            """,
            "=r,=r,r",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = stored.to(TYPE)
    return wide


@triton.jit(do_not_specialize=["num_rows", "num_squares", "ahead", "eps"])
def _linear(
    x,
    weight,
    scales,
    norm_weight,
    bias,
    squares,
    out,
    out_squares,
    parts,
    semaphores,
    num_rows,
    out_width,
    K,
    x_stride,
    num_squares,
    ahead,
    eps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    THREADS: tl.constexpr,
    FAST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of the product, or one split of a tile. See linear._linear.

    SCALE_ROWS, SCALE_COLUMNS: the size of a block; 0 columns: a block has all columns.
    """
    tile = tl.program_id(0)
    m = tl.arange(0, BM)
    inside = (m < num_rows)[None, :]
    r = tl.arange(0, BN)
    OUT: tl.constexpr = BN // 2 if GATED else BN
    n = tile * OUT + r
    if GATED:
        n = tile * OUT + r // 16 * 8 + r % 8 + r // 8 % 2 * out_width
    k = tl.arange(0, BK)
    steps = K // (BK * SPLITS)
    begin = tl.program_id(1) * steps * BK
    weight_row = weight + n.to(tl.int64) * K + begin
    if OVERLAP:
        gdc_launch_dependents()
        if ahead > 0:
            pairs_at = weight_row.to(tl.pointer_type(tl.int16), bitcast=True)
            _prefetch(pairs_at, ahead // 2, BN, THREADS)
    if SCALE_COLUMNS == 0:
        row_scale = tl.load(scales + n // SCALE_ROWS)
        scale_at = scales + n // SCALE_ROWS
    else:
        scale_at = scales + n // SCALE_ROWS * tl.cdiv(K, SCALE_COLUMNS)
    if OVERLAP:
        gdc_wait()
    s = tl.arange(0, SQUARES)[:, None]
    square_at = squares + s * num_rows + m[None, :]
    square_mask = inside & (s < num_squares)
    column = tile * OUT + tl.arange(0, OUT)[:, None]
    out_at = out + m[None, :] * out_width + column
    if SPLITS == 1:
        if SQUARES > 1:
            sums = tl.load(square_at, mask=square_mask, other=0.0)
        if ADD:
            carried = tl.load(out_at, mask=inside, other=0.0)
    weight_at = weight_row[:, None] + k[None, :]
    x_at = x + m[None, :] * x_stride + (begin + k)[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        stored = tl.load(weight_at + step * BK, eviction_policy="evict_first")
        w = widen(stored, x.dtype.element_ty, FAST)
        if WEIGHTED:
            w *= tl.load(norm_weight + begin + step * BK + k)[None, :]
        v = tl.load(x_at + step * BK, mask=inside, other=0.0)
        if SCALE_COLUMNS == 0:
            total = tl.dot(w, v, total)
        else:
            scale = tl.load(scale_at + (begin + step * BK) // SCALE_COLUMNS)
            total += tl.dot(w, v) * scale[:, None]
    if SCALE_COLUMNS == 0:
        total *= row_scale[:, None]
    if SPLITS > 1:
        part = parts + tile * (SPLITS * BN * BM) + r[:, None] * BM + m[None, :]
        tl.store(part + tl.program_id(1) * (BN * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(semaphores + tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(semaphores + tile, 0)
        total = tl.load(part, cache_modifier=".cg")
        for other in range(1, SPLITS):
            total += tl.load(part + other * (BN * BM), cache_modifier=".cg")
    if SQUARES > 1:
        if SPLITS > 1:
            sums = tl.load(square_at, mask=square_mask, other=0.0)
        total *= tl.rsqrt(tl.sum(sums, axis=0) / K + eps)[None, :]
    if BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(total, [BN // 16, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        total = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [OUT, BM])
    if ADD:
        if SPLITS > 1:
            carried = tl.load(out_at, mask=inside, other=0.0)
        total += carried.to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out_at, rounded, mask=inside)
    if ADD:
        wide = rounded.to(tl.float32)
        tl.store(out_squares + tile * num_rows + m, tl.sum(wide * wide, axis=0), mask=m < num_rows)


def linear(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
    norm: PendingNorm | None,
    norm_weight: Tensor | None,
    gated: bool,
) -> Tensor:
    """As fp8_products.fp8_linear, or as fp8_gated_linear if `gated`, in bfloat16.

    x: [M, K] with M up to tiling.rows, unit stride in K, rows aligned to 16 bytes. weight:
    contiguous [N, K]; the tiling's tiles divide N and K, and its columns divide the columns of a
    block. norm: None, or a norm whose `squares` is not None. The rest is as in linear.linear.
    """
    out = x.new_empty((len(x), len(weight) // 2 if gated else len(weight)))
    operands = (x, weight, scales, bias, semaphores, tiling)
    _launch(*operands, out, norm=norm, norm_weight=norm_weight, gated=gated)
    return out


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    """As fp8_products.fp8_add_linear, but always returns the squares.

    residual: contiguous [M, N]. The other parameters are as in `linear`.
    """
    squares = x.new_empty((len(weight) // tiling.height, len(x)), dtype=float32)
    _launch(x, weight, scales, bias, semaphores, tiling, residual, out_squares=squares)
    return residual, squares


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
    out: Tensor,
    *,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
    gated: bool = False,
    out_squares: Tensor | None = None,
) -> None:
    num_rows, width = x.shape
    programs, overlap = len(weight) // tiling.height, overlaps()
    parts = out
    if tiling.splits > 1:
        tile = tiling.rows * tiling.height
        parts = x.new_empty((programs, tiling.splits, tile), dtype=float32)
    squares = None if norm is None else norm.squares
    _linear[(programs, tiling.splits)](
        x,
        weight,
        scales.values,
        x if norm_weight is None else norm_weight,
        out if bias is None else bias,
        out if squares is None else squares,
        out,
        out if out_squares is None else out_squares,
        parts,
        semaphores,
        num_rows,
        out.shape[1],
        width,
        x.stride(0),
        0 if squares is None else len(squares),
        min(tiling.ahead, width // tiling.splits),
        0.0 if norm is None else norm.eps,
        BM=tiling.rows,
        BN=tiling.height,
        BK=tiling.columns,
        SPLITS=tiling.splits,
        STAGES=tiling.stages,
        SQUARES=1 if squares is None else triton.next_power_of_2(width // LOWEST_TILE),
        GATED=gated,
        ADD=out_squares is not None,
        BIAS=bias is not None,
        WEIGHTED=norm_weight is not None,
        SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=0 if scales.columns == width else scales.columns,
        THREADS=32 * tiling.warps,
        FAST=x.dtype == bfloat16 and not knobs.runtime.interpret,
        OVERLAP=overlap,
        num_warps=tiling.warps,
        launch_pdl=overlap,
    )
