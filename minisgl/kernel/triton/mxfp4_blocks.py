"""The MXFP4 experts of gpt-oss for many tokens, as products of blocks of tokens.

The counterpart of stacked_moe.py for packed weights. A program multiplies rows of the weight, the
tall operand of the matrix unit, with the tokens of a block. Each lane decodes its part of the
weights for itself (mxfp4.py). The matrix unit fixes the columns of a lane, and so the order of the
columns in both operands (`column`). `_arrange` brings the tokens into this order, and the first
product writes its output in it, so that a program copies its tokens to shared memory unchanged.
While the matrix unit multiplies for one program, the other units decode for another one.

Bytes, without those that L2 serves: 1.6 H I for each expert that has tokens, 2 I + 4 H for each
assignment, and 6 H for each token: two copies of 2 H, and the output.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Final, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, int32

from minisgl.kernel.triton.moe_grouped import sum_parts
from minisgl.kernel.triton.moe_routing import Blocks, align
from minisgl.kernel.triton.mxfp4 import decode_words, is_fast, rescale_factor
from minisgl.kernel.triton.overlap import has_large_tiles

_CHUNK: Final = 128  # columns: 4 blocks of 32 weights. Their order changes.
_SMALL: Final = 64  # the largest `tokens` of TILINGS whose loads fit into 99 KB of shared memory
_ARRANGED: Final = 1024  # columns that a program of `_arrange` writes


class Tile(NamedTuple):
    """The part of a product that a program computes.

    warps, repeats  the rows of the weight: 16 for each warp, `repeats` times.
    chunks          a load has `chunks` times _CHUNK columns.
    stages          loads in flight.
    """

    warps: int
    repeats: int
    chunks: int
    stages: int


class Tiling(NamedTuple):
    """Tokens of a block, and the tiles of both products."""

    tokens: int
    gate_up: Tile
    down: Tile


# The most assignments per expert for which a tiling is used. Each tiling is the fastest of 4 to 9
# on one H200 with the shapes of gpt-oss-20b and 120b (2026-11-24, torch 2.11, Triton 3.6).
TILINGS: Final = (
    (10.0, Tiling(16, Tile(4, 1, 2, 3), Tile(4, 1, 2, 3))),
    (24.0, Tiling(32, Tile(4, 2, 1, 3), Tile(4, 2, 1, 3))),
    (48.0, Tiling(64, Tile(8, 1, 1, 4), Tile(8, 1, 1, 4))),
    (512.0, Tiling(128, Tile(8, 2, 1, 3), Tile(8, 1, 1, 4))),
    (float("inf"), Tiling(256, Tile(8, 1, 1, 3), Tile(8, 1, 1, 3))),
)
_EXACT: Final = Tiling(16, Tile(4, 1, 1, 2), Tile(4, 1, 1, 2))  # for float32, which tests use


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
    blocks,
    x_stride,
    out_stride,
    alpha,
    limit,
    rescale,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    WARPS: tl.constexpr,
    REPEATS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """As moe_grouped._product, with biases and the clamped SwiGLU.

    weight: int32 words; a row has `blocks` blocks of 32 weights. The tokens of unused slots count
    as zeros, and their columns of the product are not stored.
    """
    tile = tl.program_id(0)
    owned = tl.program_id(1)
    expert = tl.load(owners + owned).to(tl.int64)
    if expert < 0:
        return
    ROWS: tl.constexpr = 16 * WARPS * REPEATS
    slot = owned * BM + tl.arange(0, BM)
    assigned = tl.load(slots + slot)
    live = assigned < num_assigned
    r = tl.arange(0, CHUNKS * ROWS)
    group = r // (16 * WARPS) % REPEATS * WARPS + r // 8 % WARPS
    half, i = r // (8 * WARPS) % 2, r % 8
    if GATED:  # a warp has 8 rows of the gate and the same rows of up
        n = column(tile * (ROWS // 2) + group * 8 + i)
        rows = expert * (2 * N) + half * N + tl.minimum(n, N - 1)
        source = assigned // TOP_K
    else:
        rows = expert * N + tl.minimum(tile * ROWS + group * 16 + half * 8 + i, N - 1)
        source = slot
    chunk = (r // ROWS)[:, None]
    word = chunk * 16 + tl.arange(0, 16)[None, :]
    block = chunk * 4 + tl.arange(0, 4)[None, :]
    word_at = weight + rows[:, None] * (blocks * 4) + word
    scale_at = scales + rows[:, None] * blocks + block
    k = tl.arange(0, CHUNKS * 128)[None, :]
    x_at = x + source[:, None].to(tl.int64) * x_stride + k
    total = tl.zeros([ROWS, BM], tl.float32)
    powers = tl.load(scale_at, mask=block < blocks, other=0)
    for step in tl.range(0, tl.cdiv(blocks, 4 * CHUNKS), num_stages=STAGES):
        left = blocks - step * (4 * CHUNKS)
        inside = block < left - 4 * CHUNKS
        next_powers = tl.load(scale_at + (step + 1) * (4 * CHUNKS), mask=inside, other=0)
        words = tl.load(word_at + step * (16 * CHUNKS), mask=word // 4 < left, other=0)
        inside = live[:, None] & (k // 128 < tl.cdiv(left, 4))
        v = tl.load(x_at + step * (128 * CHUNKS), mask=inside, other=0.0)
        w = decode_words(words, powers, x.dtype.element_ty, FAST)
        w = tl.reshape(w, [CHUNKS, REPEATS, 2, WARPS, 8, 4, 4, 2, 2, 2])
        w = tl.permute(w, (1, 3, 2, 4, 0, 6, 8, 9, 5, 7))
        w = tl.reshape(w, [ROWS, CHUNKS * 128])
        powers = next_powers
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
        n = column(tile * (ROWS // 2) + tl.arange(0, ROWS // 2))
        inside = n < N
        pairs = tl.permute(tl.reshape(total, [ROWS // 16, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(pairs, [ROWS // 2, BM, 2]))
        at = bias + expert * (2 * N) + n
        gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
        up += tl.load(at + N, mask=inside, other=0.0).to(tl.float32)[:, None]
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        value = tl.where(inside[:, None], value, 0.0)  # the second product reads the padding
        place = tile * (ROWS // 2) + tl.arange(0, ROWS // 2)
        target = slot
    else:
        place = tile * ROWS + tl.arange(0, ROWS)
        at = bias + expert * N + place
        value = total + tl.load(at, mask=place < N, other=0.0).to(tl.float32)[:, None]
        value *= tl.load(factors + assigned, mask=live, other=0.0)[None, :]
        target = assigned
    at = out + target[None, :].to(tl.int64) * out_stride + place[:, None]
    inside = place < out_stride
    tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :] & inside[:, None])


def experts_of_many(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    scales: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    experts: Tensor,
    alpha: float,
    limit: float,
    tiling: Tiling | None = None,
) -> Tensor:
    """As MoeBackend.forward, after the routing, in five launches. No host sync.

    x: [T, H], unit stride in H. gate_up, down, biases: as in ExpertWeights. scales: mxfp4_scales.
    weights, experts: as in moe_grouped.experts_of_many. alpha, limit: as in ClampedSwiglu. tiling:
    if None, `_tiling_for` chooses it.
    """
    (num_tokens, width), num_experts, top_k = x.shape, len(gate_up), experts.shape[1]
    if tiling is None:
        tiling = _tiling_for(experts.numel() / num_experts, x.dtype)
    blocks = align(experts, num_experts, tiling.tokens)
    arranged = x.new_empty((num_tokens, _padded(width)))
    columns = arranged.shape[1]
    grid = (num_tokens, triton.cdiv(columns, _ARRANGED))
    _arrange[grid](x, arranged, width, x.stride(0), columns, BLOCK=_ARRANGED, num_warps=4)
    hidden = x.new_empty((len(blocks.slots), _padded(gate_up.shape[1] // 2)))
    parts = x.new_empty((experts.numel(), width))
    own = (blocks, weights, top_k, alpha, limit)
    _launch(arranged, gate_up, scales[0], biases[0], hidden, *own, tiling.gate_up, True)
    _launch(hidden, down, scales[1], biases[1], parts, *own, tiling.down, False)
    return sum_parts(parts, top_k)


def _tiling_for(mean: float, dtype: torch.dtype) -> Tiling:
    """mean: assignments per expert."""
    if dtype == torch.float32:
        return _EXACT
    tiling = next(tiling for most, tiling in TILINGS if mean <= most)
    if tiling.tokens > _SMALL and not has_large_tiles():
        return next(smaller for _, smaller in TILINGS if smaller.tokens == _SMALL)
    return tiling


def _padded(columns: int) -> int:
    return -(-columns // _CHUNK) * _CHUNK


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor,
    out: Tensor,
    blocks: Blocks,
    factors: Tensor,
    top_k: int,
    alpha: float,
    limit: float,
    tile: Tile,
    gated: bool,
) -> None:
    height = weight.shape[1] // 2 if gated else weight.shape[1]
    rows = 16 * tile.warps * tile.repeats
    programs = triton.cdiv(out.shape[1], rows // 2 if gated else rows)
    _product[(programs, len(blocks.owners))](
        x,
        weight.view(int32),
        scales,
        bias,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        scales.shape[2],
        x.stride(0),
        out.stride(0),
        alpha,
        limit,
        rescale_factor(x),
        TOP_K=top_k,
        GATED=gated,
        BM=blocks.size,
        WARPS=tile.warps,
        REPEATS=tile.repeats,
        CHUNKS=tile.chunks,
        STAGES=tile.stages,
        FAST=is_fast(x),
        num_warps=tile.warps,
    )
