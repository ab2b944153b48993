"""The experts of a few tokens with FP8 weights, as matrix-vector products.

The counterpart of moe_few.py. The activations keep their dtype, and the weights are converted in
registers, exactly. The scale of a block of weights multiplies the partial sum of its columns.
moe_grouped.py computes many tokens.

A program is one warp, which loads all of its weights before it waits for its vectors. So no program
waits for another warp, and all programs of a product run at the same time. Each program chooses the
experts for itself (moe_choice.py).

Bytes: those of the router as in moe_few.py, and 3 H I and the scales for each of T * A assignments,
where A = top_k + shared.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# mypy: disable-error-code=assignment

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.activation import Activation
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.triton.moe_choice import all_chosen, chosen_at, rule_of
from minisgl.kernel.triton.moe_grouped import columns_in_loop
from minisgl.kernel.triton.moe_router import score_few
from minisgl.kernel.triton.moe_routing import Layer, Router
from minisgl.kernel.triton.overlap import overlaps

# Rows of gate, of up and of down in a program; columns of one load of a warp; loads of a row before
# the vectors. With 112 registers a thread, all programs of gate and up for one token run at once.
# The fastest of 91 combinations for 1 token, on one H200 with the shapes of Qwen3.6-35B-A3B,
# 2026-11-28.
_ROWS, _DOWN_ROWS = 2, 2
_COLUMNS, _LOADS = 512, 4
_REGISTERS = 112
_LANE = tl.constexpr(16)  # columns of one load of a lane


@triton.jit
def _vector(at, left, BLOCK: tl.constexpr):
    """Load `BLOCK` numbers, as float32, each in the lane that has its column of the weight.

    A lane loads 16 columns of FP8 weights at once, and 8 numbers of a 16-bit vector. In another
    shape Triton 3.6 gives a lane two pieces that are not neighbours. left: numbers that exist.
    """
    lane = tl.arange(0, BLOCK // _LANE)[:, None, None] * _LANE
    k = lane + tl.arange(0, 2)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    v = tl.load(at + k, mask=k < left, other=0.0)
    return tl.reshape(v, [BLOCK]).to(tl.float32)


@triton.jit
def _weights(at, start, width, BLOCK: tl.constexpr):
    """Load `BLOCK` columns from `start` on of each row: at has the pointers to the rows."""
    k = (start + tl.arange(0, BLOCK))[None, :]
    return tl.load(at[:, None] + k, mask=k < width, other=0.0)


@triton.jit
def _scales(at, start, width, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):
    """Load the scale of each lane's 16 columns from column `start` on: [rows of at, BLOCK / 16].

    at: pointers to the scales of the first block. COLUMNS 0: one scale for all columns.
    """
    k = (start + tl.arange(0, BLOCK // _LANE) * _LANE)[None, :]
    group = k * 0 if COLUMNS == 0 else k // COLUMNS
    return tl.load(at[:, None] + group, mask=k < width, other=0.0)


@triton.jit
def _sums(w, v, scales):
    """The products of w [ROWS, BLOCK] and v [BLOCK], summed within each lane and scaled."""
    ROWS: tl.constexpr = w.shape[0]
    LANES: tl.constexpr = w.shape[1] // _LANE
    products = tl.reshape(w.to(tl.float32) * v[None, :], [ROWS, LANES, _LANE])
    return tl.sum(products, axis=2) * scales


@triton.jit
def _gate_up(
    x,
    weight,
    scales,
    out,
    logits,
    correction,
    inner,
    width,
    x_stride,
    RULE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SAME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LOADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of silu(gate) * up for one assignment.

    SAME: whether the rows of a program have the same scales.
    """
    token = tl.program_id(1) // RULE.each
    place = tl.program_id(1) % RULE.each
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # after gdc_wait, so `_down` may read the logits at once
    own = logits + token * (RULE.experts + RULE.gated)
    expert = chosen_at(own, correction, place, RULE).to(tl.int64)
    begin = tl.program_id(0) * ROWS
    n = tl.minimum(begin + tl.arange(0, ROWS), inner - 1)
    gate_at = weight + (expert * 2 * inner + n) * width
    up_at = gate_at + inner.to(tl.int64) * width
    each = 1 if SCALE_COLUMNS == 0 else tl.cdiv(width, SCALE_COLUMNS)
    scaled = begin + tl.arange(0, 1) if SAME else n
    first = expert * tl.cdiv(2 * inner, SCALE_ROWS)
    gate_scale = scales + (first + scaled // SCALE_ROWS) * each
    up_scale = scales + (first + (inner + scaled) // SCALE_ROWS) * each
    gate = tl.zeros([ROWS, BLOCK // _LANE], tl.float32)
    up = tl.zeros([ROWS, BLOCK // _LANE], tl.float32)
    for start in range(0, width, BLOCK * LOADS):
        gates, ups, gate_scales, up_scales = (), (), (), ()
        for i in tl.static_range(LOADS):
            k = start + i * BLOCK
            gates += (_weights(gate_at, k, width, BLOCK),)
            ups += (_weights(up_at, k, width, BLOCK),)
        for i in tl.static_range(LOADS):
            k = start + i * BLOCK
            gate_scales += (_scales(gate_scale, k, width, BLOCK, SCALE_COLUMNS),)
            up_scales += (_scales(up_scale, k, width, BLOCK, SCALE_COLUMNS),)
        for i in tl.static_range(LOADS):
            k = start + i * BLOCK
            v = _vector(x + token * x_stride + k, width - k, BLOCK)
            gate += _sums(gates[i], v, gate_scales[i])
            up += _sums(ups[i], v, up_scales[i])
    g, u = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    value = g / (1.0 + tl.exp(-g)) * u
    n = begin + tl.arange(0, ROWS)
    at = out + (token * RULE.each + place) * inner + n
    tl.store(at, value.to(out.dtype.element_ty), mask=n < inner)


@triton.jit
def _down(
    hidden,
    weight,
    scales,
    out,
    logits,
    correction,
    width,
    inner,
    RULE: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SAME: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of the sum of a token's experts. ADD: they are added to `out`."""
    if EARLY:
        gdc_launch_dependents()
    EACH: tl.constexpr = RULE.each
    token = tl.program_id(1)
    begin = tl.program_id(0) * ROWS
    n = begin + tl.arange(0, ROWS)
    row = tl.minimum(n, width - 1)
    if ADD:
        carried = tl.load(out + token * width + n, mask=n < width, other=0.0)
    own = logits + token * (RULE.experts + RULE.gated)
    experts, factors = all_chosen(own, correction, RULE)
    each = 1 if SCALE_COLUMNS == 0 else tl.cdiv(inner, SCALE_COLUMNS)
    scaled = begin + tl.arange(0, 1) if SAME else row
    total = tl.zeros([ROWS, BLOCK // _LANE], tl.float32)
    for start in range(0, inner, BLOCK):
        blocks, block_scales = (), ()
        for j in tl.static_range(EACH):
            at = weight + (experts[j].to(tl.int64) * width + row) * inner + start
            blocks += (_weights(at, 0, inner - start, BLOCK),)
        for j in tl.static_range(EACH):
            first = experts[j].to(tl.int64) * tl.cdiv(width, SCALE_ROWS)
            at = scales + (first + scaled // SCALE_ROWS) * each
            own_scales = _scales(at, start, inner, BLOCK, SCALE_COLUMNS)
            block_scales += (own_scales * factors[j],)
        if EARLY:
            gdc_wait()
        for j in tl.static_range(EACH):
            at = hidden + (token * EACH + j) * inner + start
            v = _vector(at, inner - start, BLOCK)
            total += _sums(blocks[j], v, block_scales[j])
    value = tl.sum(total, axis=1)
    if ADD:
        value += carried.to(tl.float32)
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
    """As moe_few.experts_of_few, with FP8 weights. semaphores: not used.

    The blocks of the scales have a multiple of 16 of columns, or all columns.
    """
    (gate_up, gate_up_scales, _), (down, down_scales, _), _ = layer
    num_tokens, width = x.shape
    inner, early = down.shape[2], overlaps()
    rule = rule_of(router, len(down) - router[4], x.dtype)
    logits, x, residual = score_few(x, router, rule.experts, norm, norm_weight)
    correction = logits if router[6] is None else router[6]
    hidden = x.new_empty((num_tokens * rule.each, inner))
    columns, loads = _loads(width, _LOADS)
    _gate_up[(triton.cdiv(inner, _ROWS), num_tokens * rule.each)](
        x,
        gate_up,
        gate_up_scales.values,
        hidden,
        logits,
        correction,
        inner,
        width,
        x.stride(0),
        RULE=rule,
        SCALE_ROWS=gate_up_scales.rows,
        SCALE_COLUMNS=columns_in_loop(gate_up_scales, width),
        SAME=gate_up_scales.rows % _ROWS == 0 and inner % _ROWS == 0,
        ROWS=_ROWS,
        BLOCK=columns,
        LOADS=loads,
        EARLY=early,
        num_warps=1,
        maxnreg=_REGISTERS,
        launch_pdl=early,
    )
    out = x.new_empty(x.shape) if residual is None else residual
    columns, _ = _loads(inner, 1)
    _down[(triton.cdiv(width, _DOWN_ROWS), num_tokens)](
        hidden,
        down,
        down_scales.values,
        out,
        logits,
        correction,
        width,
        inner,
        RULE=rule,
        SCALE_ROWS=down_scales.rows,
        SCALE_COLUMNS=columns_in_loop(down_scales, inner),
        SAME=down_scales.rows % _DOWN_ROWS == 0 and width % _DOWN_ROWS == 0,
        ROWS=_DOWN_ROWS,
        BLOCK=columns,
        ADD=residual is not None,
        EARLY=early,
        num_warps=1,
        launch_pdl=early,
    )
    return out


def _loads(width: int, most: int) -> tuple[int, int]:
    """The columns of one load of a row with `width` columns, and the loads at once."""
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    return columns, min(triton.cdiv(width, columns), most)
