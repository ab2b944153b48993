"""x @ weight.T with FP8 weights for up to 256 rows, fused with the operations around it.

The matrix unit multiplies e4m3 with e4m3. The weights go from shared memory to the matrix unit,
without registers. A kernel that converted them to bfloat16 in registers took 43.5 us for gate and
up of Qwen3-8B, and this one takes 29.8 us.

Up to EXACT_ROWS rows, x is bfloat16. The kernel writes each element as the sum of two e4m3 numbers,
its upper and its lower four significant bits. Each row has a scale for the columns of one step over
K, a power of two. The sum is exact for elements of at least 2^-9 of the largest of their row and
step. The error of a smaller element is less than 2^-16 of the largest. The two numbers are
neighbouring columns of the narrow operand: 8 rows fill 16 columns. The weight of a norm multiplies
x first, and these products are rounded to bfloat16.

With more rows, the split would take longer than the reads of the weights. The caller then quantises
x, with one scale for each row or for each 128 of its columns.

The scale of a row of the weight multiplies the result. The scale of a block multiplies the partial
sum of one step over K.

Tiles, split-K, prefetching and the sums of squares are those of linear.py.

Bytes: N K of the weight for each block of BM rows of x, 4 N K / (rows * columns of a block) of the
scales, 2 M K of x per tile of the weight (from L2; half of it if x is quantised), and 8 M N per
split.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import math

import torch
import triton
import triton.language as tl
from torch import Tensor, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_tilings import GROUP
from minisgl.kernel.fp8_weights import Scales
from minisgl.kernel.tilings import LOWEST_TILE, Tiling
from minisgl.kernel.triton.fp8 import magnitude, power_of_two
from minisgl.kernel.triton.launch import fill_absent
from minisgl.kernel.triton.linear import load_rows, prefetch, sum_squares, summed
from minisgl.kernel.triton.overlap import overlaps


@triton.jit
def _halves(x):
    """Each element of x [K, M] as two e4m3 numbers and a scale of its column.

    x: float32. Returns e4m3 [K, 2 M], where columns 2 m and 2 m + 1 belong to column m, and float32
    [M]. The scale of a column with infinity or NaN is NaN.
    """
    K: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    most = tl.max(magnitude(x), axis=0)
    exponent = tl.maximum(most >> 23, 8)
    # The largest element is moved to 128 .. 256, below the largest number of e4m3.
    x *= power_of_two(261 - exponent)[None, :]
    scale = power_of_two(exponent - 7)
    upper = (x.to(tl.int32, bitcast=True) & -0x100000).to(tl.float32, bitcast=True)
    both = tl.reshape(tl.join(upper, x - upper), [K, 2 * M])
    return both.to(tl.float8e4nv), tl.where(most < 0x7F800000, scale, float("nan"))


@triton.jit(do_not_specialize=["num_rows", "x_scale_stride", "num_squares", "ahead", "eps"])
def _linear(
    x,
    x_scales,
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
    x_scale_stride,
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
    QUANTISED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    THREADS: tl.constexpr,
    SUMMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of the product, or one split of a tile. See linear._linear.

    QUANTISED: x is e4m3 with scales, else bfloat16. SCALE_ROWS, SCALE_COLUMNS: the size of a block
    of weights; 0 columns: a block has all columns. GROUP: columns of x with the same scale, if the
    weight has scales of blocks.
    """
    tile = tl.program_id(0)
    out_tile = tile * tl.num_programs(2) + tl.program_id(2)
    m = tl.program_id(2) * BM + tl.arange(0, BM)
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
            prefetch(pairs_at, ahead // 2, BN, THREADS)
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
        if SUMMED > 0:
            whole = load_rows(x, x_stride, num_rows, K, SUMMED)
        if ADD:
            carried = tl.load(out_at, mask=inside, other=0.0)
    weight_at = weight_row[:, None] + k[None, :]
    x_at = x + m[None, :] * x_stride + (begin + k)[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        w = tl.load(weight_at + step * BK, eviction_policy="evict_first")
        v = tl.load(x_at + step * BK, mask=inside, other=0.0)
        if QUANTISED and SCALE_COLUMNS == 0:
            total = tl.dot(w, v, total)
        elif QUANTISED:
            factor_at = x_scales + (begin + step * BK) // GROUP * x_scale_stride + m
            factor = tl.load(factor_at, mask=m < num_rows, other=0.0)
            scale = tl.load(scale_at + (begin + step * BK) // SCALE_COLUMNS)
            total += tl.dot(w, v) * (scale[:, None] * factor[None, :])
        else:
            wide = v.to(tl.float32)
            if WEIGHTED:
                wide *= tl.load(norm_weight + begin + step * BK + k).to(tl.float32)[:, None]
                wide = wide.to(tl.bfloat16).to(tl.float32)  # _halves keeps its eight bits
            both, factor = _halves(wide)
            upper, lower = tl.split(tl.reshape(tl.dot(w, both), [BN, BM, 2]))
            part = (upper + lower) * factor[None, :]
            if SCALE_COLUMNS > 0:
                part *= tl.load(scale_at + (begin + step * BK) // SCALE_COLUMNS)[:, None]
            total += part
    if SCALE_COLUMNS == 0:
        total *= row_scale[:, None]
        if QUANTISED:
            total *= tl.load(x_scales + m, mask=m < num_rows, other=0.0)[None, :]
    if SPLITS > 1:
        part = parts + out_tile * (SPLITS * BN * BM) + r[:, None] * BM + tl.arange(0, BM)[None, :]
        tl.store(part + tl.program_id(1) * (BN * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(semaphores + out_tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(semaphores + out_tile, 0)
        total = tl.load(part, cache_modifier=".cg")
        for other in range(1, SPLITS):
            total += tl.load(part + other * (BN * BM), cache_modifier=".cg")
    if SQUARES > 1:
        if SPLITS > 1:
            sums = tl.load(square_at, mask=square_mask, other=0.0)
        total *= tl.rsqrt(tl.sum(sums, axis=0) / K + eps)[None, :]
    if SUMMED > 0:
        if SPLITS > 1:
            whole = load_rows(x, x_stride, num_rows, K, SUMMED)
        total *= tl.rsqrt(sum_squares(whole, m) / K + eps)[None, :]
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
    x_scales: Tensor | None,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
    *,
    gated: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """As fp8_products.fp8_linear.

    Returns [M, N], or [M, N / 2] if `gated`, of `dtype`.

    x: [M, K], unit stride in K, rows aligned to 16 bytes; in `dtype` if x_scales is None, else
    e4m3. x_scales: None, or float32 [M, 1] or [M, K / 128] with unit stride in M, as
    fp8_products.quantise_rows returns them; [M, K / 128] if the weight has scales of blocks.
    weight: contiguous [N, K]; the tiling's tiles divide N and K, and its columns divide the columns
    of a block, and 128 if x has a scale for each 128 columns. norm, norm_weight: None if x is
    quantised; dispatch.is_fused accepts norm. The rest is as in linear.linear.
    """
    out = x.new_empty((len(x), len(weight) // 2 if gated else len(weight)), dtype=dtype)
    given = (x, x_scales, weight, scales, bias, semaphores, tiling)
    _launch(*given, out, norm=norm, norm_weight=norm_weight, gated=gated)
    return out


def add_linear(
    residual: Tensor,
    x: Tensor,
    x_scales: Tensor | None,
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
    given = (x, x_scales, weight, scales, bias, semaphores, tiling)
    _launch(*given, residual, out_squares=squares)
    return residual, squares


def _launch(
    x: Tensor,
    x_scales: Tensor | None,
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
    grid = (len(weight) // tiling.height, tiling.splits, triton.cdiv(num_rows, tiling.rows))
    overlap, parts = overlaps(), out
    if tiling.splits > 1:
        size = math.prod(grid) * tiling.rows * tiling.height
        parts = x.new_empty(size, dtype=float32)
    squares = None if norm is None else norm.squares
    inputs = x, x_scales, weight, scales.values, norm_weight, bias, squares
    tensors = fill_absent(out, *inputs, out, out_squares, parts, semaphores)
    _linear[grid](
        *tensors,
        num_rows,
        out.shape[1],
        width,
        x.stride(0),
        0 if x_scales is None else x_scales.stride(1),
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
        QUANTISED=x_scales is not None,
        SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=0 if scales.columns == width else scales.columns,
        GROUP=GROUP,
        THREADS=32 * tiling.warps,
        SUMMED=summed(width, norm),
        OVERLAP=overlap,
        num_warps=tiling.warps,
        launch_pdl=overlap,
    )
