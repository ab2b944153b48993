"""The experts of a few tokens with FP8 weights, as matrix-vector products.

The counterpart of moe_few.py. The activations keep their dtype, and the weights are converted in
registers, exactly. The scale of a block of weights multiplies the partial sum of its columns; a
scale for a whole row multiplies the result. moe_grouped.py computes many tokens.

Bytes: those of the router as in moe_few.py, and 3 H I and the scales for each of T * A assignments,
where A = top_k + shared.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.activation import Activation
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.triton.moe_grouped import columns_in_loop
from minisgl.kernel.triton.moe_router import route_few
from minisgl.kernel.triton.moe_routing import Layer, Router
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
    EACH: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of silu(gate) * up for one assignment. EACH: experts of a token."""
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
    x_at = x + (assignment // EACH) * x_stride
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
def _down_rows(
    weight,
    scales,
    expert,
    row,
    width,
    inner,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
):
    """Pointers to rows of down, and to the scales of their first blocks."""
    each = 1 if SCALE_COLUMNS == 0 else tl.cdiv(inner, SCALE_COLUMNS)
    scale_at = scales + (expert * tl.cdiv(width, SCALE_ROWS) + row // SCALE_ROWS) * each
    return weight + (expert * width + row) * inner, scale_at


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
    num_experts,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
    SHARED_PLACES: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """ROWS rows of down for each of the PLACES experts of a token, flattened to one dimension.

    ADD: they are added to `out`. The shared experts have a tile of their own, as in moe_few.py.
    """
    token = tl.program_id(1)
    flat = tl.arange(0, PLACES * ROWS)
    j = flat // ROWS
    kept = j < TOP_K
    assignment = token * (TOP_K + SHARED) + tl.minimum(j, TOP_K - 1)
    expert = tl.load(experts + assignment).to(tl.int64)
    factor = tl.load(weights + assignment, mask=kept, other=0.0)
    if ADD:
        own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        carried = tl.load(out + token * width + own, mask=own < width, other=0.0)
    n = tl.program_id(0) * ROWS + flat % ROWS
    row = tl.minimum(n, width - 1)
    weight_at, scale_at = _down_rows(
        weight, scales, expert, row, width, inner, SCALE_ROWS, SCALE_COLUMNS
    )
    if SHARED > 0:
        flat = tl.arange(0, SHARED_PLACES * ROWS)
        i = tl.minimum(flat // ROWS, SHARED - 1)
        is_shared = flat < SHARED * ROWS
        shared_assignment = token * (TOP_K + SHARED) + TOP_K + i
        shared_weight_at, shared_scale_at = _down_rows(
            weight,
            scales,
            (num_experts + i).to(tl.int64),
            tl.minimum(tl.program_id(0) * ROWS + flat % ROWS, width - 1),
            width,
            inner,
            SCALE_ROWS,
            SCALE_COLUMNS,
        )
        shared_total = tl.zeros([SHARED_PLACES * ROWS], tl.float32)
    total = tl.zeros([PLACES * ROWS], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = kept[:, None] & (k < inner)[None, :]
        w = tl.load(weight_at[:, None] + k[None, :], mask=live, other=0.0)
        if SHARED > 0:
            shared_live = is_shared[:, None] & (k < inner)[None, :]
            at = shared_weight_at[:, None] + k[None, :]
            shared_w = tl.load(at, mask=shared_live, other=0.0)
        if EARLY:
            gdc_wait()
        v = tl.load(hidden + assignment[:, None] * inner + k[None, :], mask=live, other=0.0)
        products = w.to(tl.float32) * v.to(tl.float32)
        total += _scaled_sum(products, scale_at, start, inner, SCALE_COLUMNS)
        if SHARED > 0:
            at = hidden + shared_assignment[:, None] * inner + k[None, :]
            v = tl.load(at, mask=shared_live, other=0.0)
            products = shared_w.to(tl.float32) * v.to(tl.float32)
            shared_total += _scaled_sum(products, shared_scale_at, start, inner, SCALE_COLUMNS)
    if SCALE_COLUMNS == 0:
        total *= tl.load(scale_at)
    value = tl.sum(tl.reshape(total * factor, [PLACES, ROWS]), axis=0)
    if SHARED > 0:
        if SCALE_COLUMNS == 0:
            shared_total *= tl.load(shared_scale_at)
        shared_total *= tl.load(weights + shared_assignment, mask=is_shared, other=0.0)
        value += tl.sum(tl.reshape(shared_total, [SHARED_PLACES, ROWS]), axis=0)
    if ADD:
        value += carried.to(tl.float32)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=n < width)


def takes(x: Tensor, layer: Layer) -> bool:
    """Whether `experts_of_few` supports these FP8 experts: those with SiLU."""
    return layer[2] is Activation.SILU


def experts_of_few(
    x: Tensor,
    router: Router,
    layer: Layer,
    semaphores: Tensor,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """As moe_few.experts_of_few, with FP8 weights.

    The blocks of the scales have a power of two of columns, or all columns.
    """
    (gate_up, gate_up_scales, _), (down, down_scales, _), _ = layer
    num_tokens, width = x.shape
    inner, top_k, shared = down.shape[2], router[2], router[4]
    num_experts = len(down) - shared
    early = overlaps()
    routed = route_few(x, router, num_experts, semaphores, norm, norm_weight)
    weights, experts, x, residual = routed
    hidden = x.new_empty((experts.numel(), inner))
    _gate_up[(triton.cdiv(inner, _ROWS), experts.numel())](
        x,
        gate_up,
        gate_up_scales.values,
        hidden,
        experts,
        inner,
        width,
        x.stride(0),
        EACH=top_k + shared,
        SCALE_ROWS=gate_up_scales.rows,
        SCALE_COLUMNS=columns_in_loop(gate_up_scales, width),
        ROWS=_ROWS,
        BLOCK=min(triton.next_power_of_2(width), _COLUMNS),
        EARLY=early,
        num_warps=2,
        launch_pdl=early,
    )
    places = triton.next_power_of_2(top_k)
    rows = max(_DOWN_ROWS // places, 1)
    out = routed.out()
    _down[(triton.cdiv(width, rows), num_tokens)](
        hidden,
        down,
        down_scales.values,
        out,
        experts,
        weights,
        width,
        inner,
        num_experts,
        TOP_K=top_k,
        SHARED=shared,
        PLACES=places,
        SHARED_PLACES=triton.next_power_of_2(shared) if shared else 0,
        SCALE_ROWS=down_scales.rows,
        SCALE_COLUMNS=columns_in_loop(down_scales, inner),
        ROWS=rows,
        BLOCK=min(triton.next_power_of_2(inner), _DOWN_COLUMNS),
        ADD=residual is not None,
        EARLY=early,
        num_warps=4,
        launch_pdl=early,
    )
    return out
