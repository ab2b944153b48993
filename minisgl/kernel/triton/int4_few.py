"""The experts of a few tokens with int4 weights, as products of single warps.

The counterpart of fp8_few.py. Its programs, too, are single warps that choose the experts for
themselves (moe_choice.py). The matrix unit takes 16 rows at once, but a program has only 2 to 4
rows of a matrix, so that all programs run at the same time. Each row of the matrix is cut into
parts, and each part is a row of the tile. The narrow operand has a column for the vector of each
part. Only the products of a part with its own vector count.

Bytes: those of the router as in moe_few.py, and 1.5 H I and the headers for each of T * A
assignments, where A = top_k + shared.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# mypy: disable-error-code=assignment

import triton
import triton.language as tl
from torch import Tensor, bfloat16, int32
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.activation import Activation
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.packed_order import CHUNK, OrderedWeights
from minisgl.kernel.triton.moe_choice import all_chosen, chosen_at, rule_of
from minisgl.kernel.triton.moe_router import score_few
from minisgl.kernel.triton.moe_routing import Layer, Router
from minisgl.kernel.triton.overlap import overlaps
from minisgl.kernel.triton.packed import decode_chunk, in_quads, is_fast, scale_of

# Rows of gate, of up and of down in a program, whose tile has 16 rows of parts. The fastest of 28
# combinations for 1 token, on one H200 with the shapes of Qwen3.6-35B-A3B, 2026-11-29.
_ROWS, _DOWN_ROWS = 2, 4
_COLUMNS = 2048  # of a row of gate and up, loaded before the first product


@triton.jit
def _load(words, headers, row, HEADERS: tl.constexpr):
    """Load a chunk of 16 rows: words [16, 16] and headers [16, HEADERS]. row: int64 [16]."""
    word_at = words + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    header_at = headers + row[:, None] * HEADERS + tl.arange(0, HEADERS)[None, :]
    return tl.load(word_at), tl.load(header_at)


@triton.jit
def _vectors(at, left, PARTS: tl.constexpr):
    """Load the vectors of PARTS neighbouring chunks, [PARTS, 128]. left: numbers that exist."""
    k = tl.arange(0, PARTS)[:, None] * 128 + tl.arange(0, 128)[None, :]
    return tl.load(at + k, mask=k < left, other=0.0)


@triton.jit
def _optimization_barrier(v, FAST: tl.constexpr):
    """Return v. The compiler moves no load of v behind this point.

    Otherwise Triton 3.6 moves the load to the use of v, behind the barrier of the use before.
    """
    if FAST:
        v = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [v], dtype=tl.bfloat16, is_pure=False, pack=2
        )
    return v


@triton.jit
def _products(words, headers, vectors, SCALED: tl.constexpr, FAST: tl.constexpr):
    """The products of 16 rows of a chunk and the vectors of the parts, [16, 8].

    Column c has the products with the vector of part c % PARTS. SCALED: with the scales.
    """
    PARTS: tl.constexpr = vectors.shape[0]
    w = decode_chunk(words, headers, 1, 1, False, SCALED, True, vectors.dtype, FAST)
    v = tl.broadcast_to(in_quads(vectors)[None, :, :], [8 // PARTS, PARTS, 128])
    zero = tl.zeros([16, 8], tl.float32)
    return tl.dot(w, tl.reshape(v, [8, 128]).T, zero, input_precision="ieee")


@triton.jit
def _own(total, part):
    """The products [16] of each row with the vector of its own part."""
    is_own = part[:, None] == tl.arange(0, 8)[None, :]
    return tl.sum(tl.where(is_own, total, 0.0), axis=1)


@triton.jit
def _gate_up(
    x,
    weight,
    headers,
    out,
    logits,
    correction,
    width,
    inner,
    chunks,
    x_stride,
    RULE: tl.constexpr,
    HEADERS: tl.constexpr,
    ROWS: tl.constexpr,
    STEPS: tl.constexpr,
    TURNS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of silu(gate) * up for one assignment.

    weight: int32 words of experts with `chunks` chunks of 2 * inner rows. STEPS: chunks of a part
    that are loaded before the vectors. TURNS: how often; with one, there is no loop.
    """
    PARTS: tl.constexpr = 8 // ROWS
    token = tl.program_id(1) // RULE.each
    place = tl.program_id(1) % RULE.each
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # after gdc_wait, so `_down` may read the logits at once
    own = logits + token * (RULE.experts + RULE.gated)
    expert = chosen_at(own, correction, place, RULE).to(tl.int64)
    r = tl.arange(0, 16)  # (gate or up, part, row)
    part = r // ROWS % PARTS
    n = tl.minimum(tl.program_id(0) * ROWS + r % ROWS, inner - 1) + r // 8 * inner
    total = tl.zeros([16, 8], tl.float32)
    for turn in range(TURNS):
        words, packed, vectors, held = (), (), (), ()
        for s in tl.static_range(STEPS):
            chunk = tl.minimum((turn * STEPS + s) * PARTS + part, chunks - 1)
            w, h = _load(weight, headers, (expert * chunks + chunk) * 2 * inner + n, HEADERS)
            words += (w,)
            packed += (h,)
        for s in tl.static_range(STEPS):
            k = (turn * STEPS + s) * (PARTS * 128)
            vectors += (_vectors(x + token * x_stride + k, width - k, PARTS),)
        for s in tl.static_range(STEPS):
            held += (_optimization_barrier(vectors[s], FAST),)
        for s in tl.static_range(STEPS):
            total += _products(words[s], packed[s], held[s], True, FAST)
    sums = tl.sum(tl.reshape(_own(total, part), [2, PARTS, ROWS]), axis=1)
    gate, up = tl.split(tl.permute(sums, (1, 0)))
    value = up * gate / (1.0 + tl.exp(-gate))
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = out + (token * RULE.each + place) * inner + n
    tl.store(at, value.to(out.dtype.element_ty), mask=n < inner)


@triton.jit
def _down(
    hidden,
    weight,
    headers,
    out,
    logits,
    correction,
    width,
    inner,
    chunks,
    RULE: tl.constexpr,
    HEADERS: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    FAST: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of the sum of a token's experts. ADD: they are added to `out`.

    weight: int32 words of experts with `chunks` chunks of `width` rows. TURNS: as in `_gate_up`,
    with a chunk of each part at once.
    """
    if EARLY:
        gdc_launch_dependents()
    EACH: tl.constexpr = RULE.each
    PARTS: tl.constexpr = 16 // ROWS
    SCALED: tl.constexpr = HEADERS > 1  # the weights; else each product of a chunk, which is faster
    token = tl.program_id(1)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if ADD:
        carried = tl.load(out + token * width + n, mask=n < width, other=0.0)
    own = logits + token * (RULE.experts + RULE.gated)
    experts, factors = all_chosen(own, correction, RULE)
    r = tl.arange(0, 16)  # (part, row)
    part = r // ROWS
    row = tl.minimum(tl.program_id(0) * ROWS + r % ROWS, width - 1)
    total = tl.zeros([16, 8], tl.float32)
    for turn in range(TURNS):
        words, packed, shares, vectors, held = (), (), (), (), ()
        chunk = tl.minimum(turn * PARTS + part, chunks - 1)
        for j in tl.static_range(EACH):
            own_row = (experts[j].to(tl.int64) * chunks + chunk) * width + row
            w, h = _load(weight, headers, own_row, HEADERS)
            words += (w,)
            packed += (h,)
        for j in tl.static_range(EACH):
            shares += (factors[j] if SCALED else scale_of(packed[j]) * factors[j],)
        if EARLY:
            gdc_wait()
        k = turn * (PARTS * 128)
        for j in tl.static_range(EACH):
            vectors += (_vectors(hidden + (token * EACH + j) * inner + k, inner - k, PARTS),)
        for j in tl.static_range(EACH):
            held += (_optimization_barrier(vectors[j], FAST),)
        for j in tl.static_range(EACH):
            total += _products(words[j], packed[j], held[j], SCALED, FAST) * shares[j]
    value = tl.sum(tl.reshape(_own(total, part), [PARTS, ROWS]), axis=0)
    if ADD:
        value += carried.to(tl.float32)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=n < width)


def takes(x: Tensor, layer: Layer) -> bool:
    """Whether `experts_of_few` supports x and the experts: bfloat16, or in the interpreter all."""
    is_dtype = x.dtype == bfloat16 or knobs.runtime.interpret
    return is_dtype and isinstance(layer[0][1], OrderedWeights)


def experts_of_few(
    x: Tensor,
    router: Router,
    layer: Layer,
    semaphores: Tensor,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """As moe_few.experts_of_few, with int4 weights in x and layer that `takes` accepts.

    semaphores: not used.
    """
    (_, gate_up, _), (_, down, _), activation = layer
    assert activation is Activation.SILU, "int4 experts have SiLU; this is a bug"
    num_tokens, width = x.shape
    inner, early, fast = down.columns, overlaps(), is_fast(x)
    rule = rule_of(router, len(down.codes) - router[4], x.dtype)
    logits, x, residual = score_few(x, router, rule.experts, norm, norm_weight)
    correction = logits if router[6] is None else router[6]
    hidden = x.new_empty((num_tokens * rule.each, inner))
    chunks, columns = gate_up.codes.shape[1], CHUNK * 8 // _ROWS
    steps = min(triton.cdiv(width, columns), _COLUMNS // columns)
    _gate_up[(triton.cdiv(inner, _ROWS), num_tokens * rule.each)](
        x,
        gate_up.codes.view(int32),
        gate_up.headers,
        hidden,
        logits,
        correction,
        width,
        inner,
        chunks,
        x.stride(0),
        RULE=rule,
        HEADERS=gate_up.headers.shape[-1],
        ROWS=_ROWS,
        STEPS=steps,
        TURNS=triton.cdiv(width, columns * steps),
        FAST=fast,
        EARLY=early,
        num_warps=1,
        num_stages=1,
        launch_pdl=early,
    )
    out = x.new_empty(x.shape) if residual is None else residual
    _down[(triton.cdiv(width, _DOWN_ROWS), num_tokens)](
        hidden,
        down.codes.view(int32),
        down.headers,
        out,
        logits,
        correction,
        width,
        inner,
        down.codes.shape[1],
        RULE=rule,
        HEADERS=down.headers.shape[-1],
        ROWS=_DOWN_ROWS,
        TURNS=triton.cdiv(inner, CHUNK * 16 // _DOWN_ROWS),
        FAST=fast,
        ADD=residual is not None,
        EARLY=early,
        num_warps=1,
        num_stages=1,
        launch_pdl=early,
    )
    return out
