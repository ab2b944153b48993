"""The experts of a mixture of experts with FP8 weights.

The counterparts of moe_few.py (few tokens, as matrix-vector products) and of moe_grouped.py (blocks
of tokens that share an expert). Few tokens keep bfloat16 activations, and the weights are converted
in registers, exactly. Blocks of tokens multiply quantised activations, with one scale for each
token or for each 128 of its columns: the matrix unit then reads the weights without a conversion.
If the activations are not bfloat16, or a block of weights has neither 128 columns nor all of them,
the weights are converted as for few tokens.

The scale of a block of weights multiplies the partial sum of its columns; a scale for a whole row
multiplies the result.

Bytes: 3 H I and the scales for each expert that has tokens; the rest as in the counterparts.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, bfloat16, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.fp8_weights import Scales
from minisgl.kernel.triton.fp8 import widen
from minisgl.kernel.triton.fp8_quantise import quantise_rows
from minisgl.kernel.triton.moe_few import route_few
from minisgl.kernel.triton.moe_grouped import Tile, sum_parts, tiling_for
from minisgl.kernel.triton.moe_routing import Blocks, Layer, Router, align
from minisgl.kernel.triton.overlap import overlaps

# The weights of a program, as in moe_few.py.
_ROWS, _COLUMNS = 4, 2048
_DOWN_ROWS, _DOWN_COLUMNS = 16, 512


@triton.jit
def _scaled_sum(products, row_scale, start, width, SCALE_COLUMNS: tl.constexpr):
    """Sum products [ROWS, BLOCK] of the columns from `start` on, times the scales of their blocks.

    row_scale: pointers [ROWS] to the scales of the first block. SCALE_COLUMNS 0: no scale.
    """
    ROWS: tl.constexpr = products.shape[0]
    BLOCK: tl.constexpr = products.shape[1]
    if SCALE_COLUMNS == 0:
        total = tl.sum(products, axis=1)
    else:
        GROUP: tl.constexpr = SCALE_COLUMNS if SCALE_COLUMNS < BLOCK else BLOCK
        GROUPS: tl.constexpr = BLOCK // GROUP
        group = start // SCALE_COLUMNS + tl.arange(0, GROUPS)
        known = (group < tl.cdiv(width, SCALE_COLUMNS))[None, :]
        scale = tl.load(row_scale[:, None] + group[None, :], mask=known, other=0.0)
        sums = tl.sum(tl.reshape(products, [ROWS, GROUPS, GROUP]), axis=2)
        total = tl.sum(sums * scale, axis=1)
    return total


@triton.jit
def _gate_up(
    x,
    weight,
    scales,
    out,
    experts,
    inner,
    width,
    x_stride,
    TOP_K: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # after gdc_wait, so `_down` may read the routing at once
    assignment = tl.program_id(1)
    expert = tl.load(experts + assignment).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < inner
    n = tl.minimum(n, inner - 1)
    gate_at = weight + (expert * 2 * inner + n[:, None]) * width
    up_at = weight + (expert * 2 * inner + inner + n[:, None]) * width
    each = 1 if SCALE_COLUMNS == 0 else tl.cdiv(width, SCALE_COLUMNS)
    of_expert = expert * tl.cdiv(2 * inner, SCALE_ROWS)
    gate_scale = scales + (of_expert + n // SCALE_ROWS) * each
    up_scale = scales + (of_expert + (inner + n) // SCALE_ROWS) * each
    x_at = x + (assignment // TOP_K) * x_stride
    gate = tl.zeros([ROWS], tl.float32)
    up = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = (k < width)[None, :]
        g = tl.load(gate_at + k[None, :], mask=live, other=0.0)
        u = tl.load(up_at + k[None, :], mask=live, other=0.0)
        v = tl.load(x_at + k, mask=k < width, other=0.0).to(tl.float32)[None, :]
        gate += _scaled_sum(g.to(tl.float32) * v, gate_scale, start, width, SCALE_COLUMNS)
        up += _scaled_sum(u.to(tl.float32) * v, up_scale, start, width, SCALE_COLUMNS)
    if SCALE_COLUMNS == 0:
        gate *= tl.load(gate_scale)
        up *= tl.load(up_scale)
    value = gate / (1.0 + tl.exp(-gate)) * up
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + assignment * inner + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    hidden,
    weight,
    scales,
    out,
    experts,
    weights,
    width,
    inner,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows of down for each of the PLACES experts of a token, flattened to one dimension."""
    token = tl.program_id(1)
    flat = tl.arange(0, PLACES * ROWS)
    j = flat // ROWS
    kept = j < TOP_K
    assignment = token * TOP_K + tl.minimum(j, TOP_K - 1)
    expert = tl.load(experts + assignment).to(tl.int64)
    factor = tl.load(weights + assignment, mask=kept, other=0.0)
    n = tl.program_id(0) * ROWS + flat % ROWS
    row = tl.minimum(n, width - 1)
    weight_at = weight + (expert * width + row) * inner
    each = 1 if SCALE_COLUMNS == 0 else tl.cdiv(inner, SCALE_COLUMNS)
    scale_at = scales + (expert * tl.cdiv(width, SCALE_ROWS) + row // SCALE_ROWS) * each
    total = tl.zeros([PLACES * ROWS], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = kept[:, None] & (k < inner)[None, :]
        w = tl.load(weight_at[:, None] + k[None, :], mask=live, other=0.0)
        if EARLY:
            gdc_wait()
        v = tl.load(hidden + assignment[:, None] * inner + k[None, :], mask=live, other=0.0)
        products = w.to(tl.float32) * v.to(tl.float32)
        total += _scaled_sum(products, scale_at, start, inner, SCALE_COLUMNS)
    if SCALE_COLUMNS == 0:
        total *= tl.load(scale_at)
    value = tl.sum(tl.reshape(total * factor, [PLACES, ROWS]), axis=0)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=n < width)


@triton.jit(do_not_specialize=["num_assigned", "x_scale_stride"])
def _product(
    x,
    x_scales,
    weight,
    scales,
    out,
    slots,
    owners,
    factors,
    num_assigned,
    N,
    K,
    x_stride,
    x_scale_stride,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    QUANTISED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """One tile of the product of a block of tokens with its expert's weight: moe_grouped._product.

    QUANTISED: x is FP8, and x_scales has its scales, one for each row and SCALE_COLUMNS columns.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    slot = block * BM + tl.arange(0, BM)
    assigned = tl.load(slots + slot)
    live = assigned < num_assigned
    row = tl.arange(0, BN)
    k = tl.arange(0, BK)
    if GATED:
        n = tl.minimum(tile * (BN // 2) + row // 2, N - 1) + (row % 2) * N
        height = 2 * N
        source = assigned // TOP_K
    else:
        n = tl.minimum(tile * BN + row, N - 1)
        height = N
        source = slot
    weight_at = weight + (expert * height + n)[:, None] * K + k[None, :]
    x_at = x + source[None, :].to(tl.int64) * x_stride + k[:, None]
    each = 1 if SCALE_COLUMNS == 0 else tl.cdiv(K, SCALE_COLUMNS)
    scale_at = scales + (expert * tl.cdiv(height, SCALE_ROWS) + n // SCALE_ROWS) * each
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        left = K - step * BK
        w = tl.load(weight_at + step * BK, mask=(k < left)[None, :], other=0.0)
        if not QUANTISED:
            w = widen(w, x.dtype.element_ty, FAST)
        v = tl.load(x_at + step * BK, mask=live[None, :] & (k < left)[:, None], other=0.0)
        if SCALE_COLUMNS == 0:
            total = tl.dot(w, v, total, input_precision="ieee")
        else:
            group = step * BK // SCALE_COLUMNS
            part = tl.dot(w, v, input_precision="ieee") * tl.load(scale_at + group)[:, None]
            if QUANTISED:
                x_scale_at = x_scales + group * x_scale_stride + source
                part *= tl.load(x_scale_at, mask=live, other=0.0)[None, :]
            total += part
    if SCALE_COLUMNS == 0:
        total *= tl.load(scale_at)[:, None]
        if QUANTISED:
            total *= tl.load(x_scales + source, mask=live, other=0.0)[None, :]
    if GATED:
        pairs = total.reshape(BN // 2, 2, BM).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        value = gate / (1.0 + tl.exp(-gate)) * up
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
        target = slot
    else:
        value = total * tl.load(factors + assigned, mask=live, other=0.0)[None, :]
        n = tile * BN + row
        target = assigned
    at = out + target[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def takes(x: Tensor, layer: Layer) -> bool:
    """Whether `experts_of_few` supports these FP8 experts: all of them."""
    return True


def experts_of_few(x: Tensor, router: Router, layer: Layer, semaphores: Tensor) -> Tensor:
    """As moe_few.experts_of_few, with FP8 weights.

    The blocks of the scales have a power of two of columns, or all columns.
    """
    (gate_up, gate_up_scales, _), (down, down_scales, _), _ = layer
    num_tokens, width = x.shape
    inner, top_k = down.shape[2], router[2]
    early = overlaps()
    weights, experts = route_few(x, router, semaphores)
    hidden = x.new_empty((num_tokens * top_k, inner))
    _gate_up[(triton.cdiv(inner, _ROWS), num_tokens * top_k)](
        x,
        gate_up,
        gate_up_scales.values,
        hidden,
        experts,
        inner,
        width,
        x.stride(0),
        TOP_K=top_k,
        SCALE_ROWS=gate_up_scales.rows,
        SCALE_COLUMNS=_in_loop(gate_up_scales, width),
        ROWS=_ROWS,
        BLOCK=min(triton.next_power_of_2(width), _COLUMNS),
        EARLY=early,
        num_warps=2,
        launch_pdl=early,
    )
    places = triton.next_power_of_2(top_k)
    rows = max(_DOWN_ROWS // places, 1)
    out = x.new_empty((num_tokens, width))
    _down[(triton.cdiv(width, rows), num_tokens)](
        hidden,
        down,
        down_scales.values,
        out,
        experts,
        weights,
        width,
        inner,
        TOP_K=top_k,
        PLACES=places,
        SCALE_ROWS=down_scales.rows,
        SCALE_COLUMNS=_in_loop(down_scales, inner),
        ROWS=rows,
        BLOCK=min(triton.next_power_of_2(inner), _DOWN_COLUMNS),
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out


def experts_of_many(
    x: Tensor,
    layer: Layer,
    weights: Tensor,
    experts: Tensor,
    quantised: bool | None = None,
) -> Tensor:
    """As moe_grouped.experts_of_many, with FP8 weights.

    The scales are as in `experts_of_few`, with 32 columns or more. quantised: whether to quantise
    the activations; None: only bfloat16 ones.
    """
    (gate_up, gate_up_scales, _), (down, down_scales, _), _ = layer
    num_experts, top_k = len(gate_up), experts.shape[1]
    tiling = tiling_for(experts.numel(), num_experts, x.dtype == float32)
    if quantised is None:
        quantised = x.dtype == bfloat16
    blocks = align(experts, num_experts, tiling.tokens)
    hidden = x.new_empty((len(blocks.slots), down.shape[2]))
    parts = x.new_empty((experts.numel(), x.shape[1]))
    own = (blocks, weights, top_k)
    _launch(x, gate_up, gate_up_scales, hidden, *own, tiling.gate_up, True, quantised)
    _launch(hidden, down, down_scales, parts, *own, tiling.down, False, quantised)
    return sum_parts(parts, top_k)


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    out: Tensor,
    blocks: Blocks,
    factors: Tensor,
    top_k: int,
    tile: Tile,
    gated: bool,
    quantised: bool,
) -> None:
    height, width = out.shape[1], weight.shape[2]
    in_loop = _in_loop(scales, width)
    # A scale of activations is for 128 columns. With weights in blocks of another width, the
    # activations are therefore not quantised.
    quantised = quantised and in_loop in (0, 128)
    x_scales, stride, columns = scales.values, 0, tile.columns
    if quantised:
        x, x_scales = quantise_rows(x, grouped=in_loop > 0)
        stride, columns = x_scales.stride(1), 2 * tile.columns  # as many bytes as of bfloat16
    # With blocks, a program holds a second tile of sums, and 256 rows would not fit its registers.
    tall = min(tile.rows, 128) if in_loop else tile.rows
    rows = tall // 2 if gated else tall
    _product[(triton.cdiv(height, rows), len(blocks.owners))](
        x,
        x_scales,
        weight,
        scales.values,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        width,
        x.stride(0),
        stride,
        TOP_K=top_k,
        GATED=gated,
        QUANTISED=quantised,
        SCALE_ROWS=scales.rows,
        SCALE_COLUMNS=in_loop,
        BM=blocks.size,
        BN=tall,
        BK=min(columns, in_loop or columns),
        STAGES=tile.stages,
        FAST=out.dtype == bfloat16 and overlaps(),  # `widen` needs Hopper or later, as PDL does
        num_warps=tile.warps,
    )


def _in_loop(scales: Scales, width: int) -> int:
    """The columns of a block; 0 if a block has all columns of the matrix."""
    return 0 if scales.columns >= width else scales.columns
