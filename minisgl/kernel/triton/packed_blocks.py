"""Experts of 4-bit weights for many tokens, as products of blocks of tokens.

The counterpart of moe_grouped.py for packed weights: MXFP4 with the biases and the clamped SwiGLU
of gpt-oss, and int4 without them. A program multiplies rows of the weight, the tall operand of the
matrix unit, with the tokens of a block. Each lane decodes its part of the weights for itself
(mxfp4.py, packed.py). In MXFP4, the matrix unit fixes the columns of a lane, and so the order of
the columns in both operands (`column`). `_arrange` brings the tokens into this order, and the first
product writes its output in it, so that a program copies its tokens to shared memory unchanged. The
codes of int4 are stored such that the order of the columns is the natural one.
While the matrix unit multiplies for one program, the other units decode for another one. A program
of the second product starts while programs of the first one still run (overlap.py).

Bytes, without those that L2 serves: 1.6 H I for each expert that has tokens, 2 I + 4 H for each
assignment, and 2 H for each token. MXFP4 adds two copies of 2 H for each token.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, int32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.activation import Activation
from minisgl.kernel.packed_order import OrderedWeights
from minisgl.kernel.triton.moe_grouped import sum_parts
from minisgl.kernel.triton.moe_routing import Blocks, Layer, Matrix, align
from minisgl.kernel.triton.mxfp4 import decode_words, is_fast, rescale_factor
from minisgl.kernel.triton.overlap import has_large_tiles, is_hopper, overlaps
from minisgl.kernel.triton.packed import decode_chunk, in_quads

_CHUNK: Final = 128  # columns: 4 blocks of 32 weights. Their order changes.
_ARRANGED: Final = 1024  # columns that a program of `_arrange` writes


class Tile(NamedTuple):
    """The part of a product that a program computes.

    warps, repeats  the rows of the weight: 16 for each warp, `repeats` times.
    stages          loads in flight, of one chunk each.
    """

    warps: int
    repeats: int
    stages: int


class Tiling(NamedTuple):
    """Tokens of a block, and the tiles of both products."""

    tokens: int
    gate_up: Tile
    down: Tile


# The most assignments per expert for which a tiling is used. Each tiling is the fastest of 4 to 9
# on one H200 with the shapes of gpt-oss-20b and 120b (2026-11-24, torch 2.11, Triton 3.6).
TILINGS: Final = (
    (10.0, Tiling(16, Tile(4, 2, 3), Tile(4, 2, 3))),
    (24.0, Tiling(32, Tile(4, 2, 3), Tile(4, 2, 3))),
    (48.0, Tiling(64, Tile(8, 1, 4), Tile(8, 1, 4))),
    (512.0, Tiling(128, Tile(8, 2, 3), Tile(8, 1, 4))),
    (float("inf"), Tiling(256, Tile(8, 1, 3), Tile(8, 1, 3))),
)
# The tiling with the most tokens whose loads fit into 99 KiB of shared memory. Not measured.
_SMALL: Final = Tiling(64, Tile(8, 1, 3), Tile(8, 1, 3))
_EXACT: Final = Tiling(16, Tile(4, 1, 2), Tile(4, 1, 2))  # for float32, which tests use


@triton.jit
def column(place):
    """The column of the tokens at this place of the operands.

    The bits of a place, from the highest: chunk, word (2), pair (2), block (2), upper. Those of a
    column: chunk, block (2), word (2), upper, pair (2). Column c of a word is the code c: its bit
    `upper` is set in the last four codes, and `pair` is the pair of mxfp4_weights that has it.
    """
    word, pair = (place >> 5) & 3, (place >> 3) & 3
    block, upper = (place >> 1) & 3, place & 1
    return (place >> 7 << 7) + block * 32 + word * 8 + upper * 4 + pair


@triton.jit
def _arrange(x, out, K, x_stride, out_stride, BLOCK: tl.constexpr):
    """Write the columns of a token in the order of the operands. Columns from K on are zeros."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    k = column(place)
    value = tl.load(x + token * x_stride + k, mask=k < K, other=0.0)
    tl.store(out + token * out_stride + place, value, mask=place < out_stride)


@triton.jit(do_not_specialize=["num_assigned"])
def _product(
    x,
    weight,
    scales,
    bias,
    out,
    slots,
    owners,
    factors,
    num_assigned,
    N,
    K,
    chunks,
    x_stride,
    out_stride,
    alpha,
    limit,
    rescale,
    HEADERS: tl.constexpr,
    WHOLE: tl.constexpr,
    QUADS: tl.constexpr,
    EACH: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    WARPS: tl.constexpr,
    REPEATS: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """As moe_grouped._product. weight: int32 words; a row has `chunks` chunks of 128 weights.

    HEADERS 0: MXFP4 with biases and the clamped SwiGLU. scales: int32, the 4 scales of a row and
    chunk. Else: int4 without biases, with silu(gate) * up. scales: the headers of OrderedWeights,
    HEADERS for a row and chunk. WHOLE: K is a multiple of 128. QUADS: as in packed.decode_chunk.

    The tokens of unused slots count as zeros, and their columns of the product are not stored.
    """
    MXFP4: tl.constexpr = HEADERS == 0
    EACH_CHUNK: tl.constexpr = 1 if MXFP4 else HEADERS
    if EARLY:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    owned = tl.program_id(1)
    expert = tl.load(owners + owned).to(tl.int64)
    if expert < 0:
        if EARLY:
            gdc_wait()
        return
    ROWS: tl.constexpr = 16 * WARPS * REPEATS
    slot = owned * BM + tl.arange(0, BM)
    assigned = tl.load(slots + slot)
    live = assigned < num_assigned
    r = tl.arange(0, ROWS)
    group = r // (16 * WARPS) * WARPS + r // 8 % WARPS
    half, i = r // (8 * WARPS) % 2, r % 8
    if GATED:  # a warp has 8 rows of the gate and the same rows of up
        n = tile * (ROWS // 2) + group * 8 + i
        if MXFP4:
            n = column(n)
        row = half * N + tl.minimum(n, N - 1)
        height = 2 * N
        source = assigned // EACH
        n = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        if MXFP4:
            n = column(n)
            bias_at = bias + expert * height + n
            first_bias = tl.load(bias_at, mask=n < N, other=0.0)
            second_bias = tl.load(bias_at + N, mask=n < N, other=0.0)
    else:
        row = tl.minimum(tile * ROWS + group * 16 + half * 8 + i, N - 1)
        height = N
        source = slot
        n = tile * ROWS + tl.arange(0, ROWS)
        if MXFP4:
            first_bias = tl.load(bias + expert * height + n, mask=n < N, other=0.0)
    at = expert * chunks * height + row
    word_at = weight + at[:, None] * 16 + tl.arange(0, 16)[None, :]
    scale_at = scales + at[:, None] * EACH_CHUNK + tl.arange(0, EACH_CHUNK)[None, :]
    k = tl.arange(0, 128)[None, :]
    x_at = x + source[:, None].to(tl.int64) * x_stride + k
    total = tl.zeros([ROWS, BM], tl.float32)
    if EARLY:
        gdc_wait()
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        packed = tl.load(scale_at + chunk * height * EACH_CHUNK)
        words = tl.load(word_at + chunk * height * 16)
        inside = live[:, None] if WHOLE else live[:, None] & (k < K - chunk * 128)
        v = tl.load(x_at + chunk * 128, mask=inside, other=0.0)
        TYPE: tl.constexpr = x.dtype.element_ty
        if MXFP4:
            powers = (packed >> (8 * tl.arange(0, 4))[None, :]) & 255
            w = decode_words(words, powers, TYPE, FAST)
            w = tl.reshape(w, [REPEATS, 2, WARPS, 8, 4, 4, 2, 2, 2])
            w = tl.permute(w, (0, 2, 1, 3, 5, 7, 8, 4, 6))
            w = tl.reshape(w, [ROWS, 128])
        else:
            w = decode_chunk(words, packed, WARPS, REPEATS, False, True, QUADS, TYPE, FAST)
        if QUADS:
            v = in_quads(v)
        total = tl.dot(w, v.T, total, input_precision="ieee")
        if FAST:
            # This use of the sum makes the program wait for its products before it decodes the
            # next weights. Without it, Triton 3.6 lets the decoding write registers from which the
            # matrix unit still reads (triton-lang/triton issue 9433).
            total = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
            )
    total *= rescale
    if GATED:
        pairs = tl.permute(tl.reshape(total, [ROWS // 16, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(pairs, [ROWS // 2, BM, 2]))
        if MXFP4:
            gate = tl.minimum(gate + first_bias.to(tl.float32)[:, None], limit)
            up += second_bias.to(tl.float32)[:, None]
            up = tl.maximum(tl.minimum(up, limit), -limit) + 1.0
        value = up * gate / (1.0 + tl.exp(-alpha * gate))
        value = tl.where((n < N)[:, None], value, 0.0)  # the second product reads the padding
        place = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        target = slot
    else:
        # Before the loop, the factors of a large block would take many registers.
        factor = tl.load(factors + assigned, mask=live, other=0.0)
        if MXFP4:
            total += first_bias.to(tl.float32)[:, None]
        value = total * factor[None, :]
        place = n
        target = assigned
    at = out + target[None, :].to(tl.int64) * out_stride + place[:, None]
    inside = place < out_stride
    tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :] & inside[:, None])


def experts_of_many(
    x: Tensor,
    layer: Layer,
    weights: Tensor,
    experts: Tensor,
    shared: int = 0,
    tiling: Tiling | None = None,
) -> Tensor:
    """As MoeBackend.forward, after the routing, in four launches, or five in MXFP4. No host sync.

    x: [T, H], unit stride in H. weights, experts, shared: as in moe_grouped.experts_of_many.
    tiling: if None, `_tiling_for` chooses it.
    """
    gate_up, down, _ = layer
    is_int4, swiglu = isinstance(gate_up[1], OrderedWeights), swiglu_of(layer)
    (num_tokens, width), each = x.shape, experts.shape[1]
    num_experts, inner = len(gate_up[0]) - shared, gate_up[0].shape[2] // 2
    if tiling is None:
        tiling = _tiling_for(num_tokens * (each - shared) / num_experts, x.dtype)
    blocks = align(experts, num_experts, tiling.tokens, shared)
    if not is_int4:
        arranged = x.new_empty((num_tokens, _padded(width)))
        columns, inner = arranged.shape[1], _padded(inner)
        grid = (num_tokens, triton.cdiv(columns, _ARRANGED))
        _arrange[grid](x, arranged, width, x.stride(0), columns, BLOCK=_ARRANGED, num_warps=4)
        x = arranged
    hidden = x.new_empty((len(blocks.slots), inner))
    parts = x.new_empty((experts.numel(), width))
    own = (blocks, weights, each, swiglu)
    _launch(x, gate_up, hidden, *own, tiling.gate_up, True)
    _launch(hidden, down, parts, *own, tiling.down, False)
    return sum_parts(parts, each)


def swiglu_of(layer: Layer) -> tuple[float, float]:
    """The factors of the clamped SwiGLU of MXFP4 experts; for int4, numbers without effect."""
    gate_up, _, activation = layer
    swiglu = activation if isinstance(activation, tuple) else (1.0, 0.0)
    is_int4 = isinstance(gate_up[1], OrderedWeights)
    is_known = activation is Activation.SILU if is_int4 else swiglu is activation
    assert is_known, "MXFP4 experts have a clamped SwiGLU, int4 ones SiLU; this is a bug"
    return swiglu


def _tiling_for(mean: float, dtype: torch.dtype) -> Tiling:
    """mean: assignments per expert."""
    if dtype == torch.float32:
        return _EXACT
    tiling = next(tiling for most, tiling in TILINGS if mean <= most)
    if tiling.tokens >= _SMALL.tokens and not has_large_tiles():
        return _SMALL
    return tiling


def _padded(columns: int) -> int:
    return -(-columns // _CHUNK) * _CHUNK


def _launch(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    blocks: Blocks,
    factors: Tensor,
    each: int,
    swiglu: tuple[float, float],
    tile: Tile,
    gated: bool,
) -> None:
    weight, scales, bias = matrix
    chunks, rows_of_weight = weight.shape[1:3]
    height = rows_of_weight // 2 if gated else rows_of_weight
    early, rows = overlaps(), 16 * tile.warps * tile.repeats
    programs = triton.cdiv(out.shape[1], rows // 2 if gated else rows)
    is_int4 = isinstance(scales, OrderedWeights)
    _product[(programs, len(blocks.owners))](
        x,
        weight.view(int32),
        scales.headers if is_int4 else scales.view(int32),
        x if bias is None else bias,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        x.shape[1],
        chunks,
        x.stride(0),
        out.stride(0),
        *swiglu,
        1.0 if is_int4 else rescale_factor(x),
        HEADERS=scales.headers.shape[-1] if is_int4 else 0,
        WHOLE=x.shape[1] % _CHUNK == 0,
        QUADS=is_int4 and not is_hopper(),
        EACH=each,
        GATED=gated,
        BM=blocks.size,
        WARPS=tile.warps,
        REPEATS=tile.repeats,
        STAGES=tile.stages,
        FAST=is_fast(x),
        EARLY=early,
        num_warps=tile.warps,
        launch_pdl=early,
    )
