"""Router and MXFP4 experts of gpt-oss for a few tokens, in three launches.

The counterpart of moe_few.py. The experts of a token are products with one vector. The matrix unit
computes them, because its rate leaves the other units to the decoding of the weights. The vector
fills the 8 columns of the narrow operand.

A lane reads 16 bytes at once: a block of 32 weights, which has one scale. It decodes them to the
pairs of bfloat16 numbers that the matrix unit takes from this lane, so that no weight passes
through shared memory. For that, the columns of a product are not in the order of memory (_total).
The lane reads its next bytes before it decodes the last ones.

Bytes read: 2 H E for the router, 1.6 H I for each of T * top_k assignments.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor, bfloat16, int32
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton.moe_few import route_few
from minisgl.kernel.triton.overlap import overlaps
from minisgl.kernel.triton.stacked_moe import number


class Tile(NamedTuple):
    """The weights that a program loads at once: 16 rows.

    chunks  loads of a lane for a row, of 32 weights each.
    splits  parts of the columns, each of which is a warp of its own.
    """

    chunks: int
    splits: int


class FewTiling(NamedTuple):
    """The tiles of both products. Each expert of a token has its own warps in `down`."""

    gate_up: Tile
    down: Tile


# A multiprocessor needs about 48 KiB of loads in flight. A warp has chunks KiB, or twice as many
# while it decodes. With H = I = 2880 and 4 experts, a multiprocessor has 11 * splits warps of
# gate_up and 5.5 * splits warps of down. Not measured yet.
TILINGS: Final = (
    FewTiling(Tile(2, 2), Tile(2, 2)),
    FewTiling(Tile(4, 1), Tile(4, 2)),
    FewTiling(Tile(1, 4), Tile(1, 4)),
    FewTiling(Tile(2, 1), Tile(2, 4)),
)
# Numbers that `decode_words` returns with FAST are smaller than the weights by this factor.
_REDUCED: Final = 2.0**32


@triton.jit
def decode_words(words, scales, TYPE: tl.constexpr, FAST: tl.constexpr):
    """MXFP4 to TYPE.

    words: int32 [ROWS, WORDS], 8 codes each, the first one in the lowest bits. scales: uint8
    [ROWS, WORDS / 4]. Returns [ROWS, WORDS, 8].

    FAST, for bfloat16 only: the numbers are 2^-32 times the weights, and two are converted at once.
    The 3 low bits of a code move to the lowest bit of bfloat16's exponent, the next one and the
    first of the mantissa. A product with the scale corrects the bias, also of the subnormal number
    0.5. Exact for scales from 2^-94 to 2^33. Larger scales count as 2^33; with smaller ones, small
    numbers become zero.
    """
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    exponents = tl.broadcast_to(scales.to(tl.int32)[:, :, None], [ROWS, WORDS // 4, 4])
    exponents = tl.reshape(exponents, [ROWS, WORDS])
    if FAST:
        powers = (tl.minimum(exponents, 160) + 94) * 0x00800080  # 2^(exponent - 33), twice
        # The shifts move codes 0 and 4, 1 and 5, 2 and 6, and 3 and 7 into place.
        first, second, third, fourth = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 s, m;
            shl.b32 s, $4, 12;
            shl.b32 m, $4, 6;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $0, m, $5;
            shl.b32 s, $4, 8;
            shl.b32 m, $4, 2;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $1, m, $5;
            shl.b32 s, $4, 4;
            shr.b32 m, $4, 2;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $2, m, $5;
            shr.b32 m, $4, 6;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, $4, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $3, m, $5;
            }
            """,
            "=&r,=&r,=&r,=r,r,r",
            [words, powers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        even = tl.join(_halves(first), _halves(third))
        odd = tl.join(_halves(second), _halves(fourth))
        numbers = tl.reshape(tl.join(even, odd), [ROWS, WORDS, 8])
    else:
        codes = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        # The exponent 0 is 2^-127, which is subnormal in float32.
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
        powers = bits.to(tl.float32, bitcast=True).to(TYPE)
        numbers = number(codes, TYPE) * powers[:, :, None]
    return numbers


@triton.jit
def _halves(pairs):
    """The two bfloat16 numbers in each int32, the lower half first."""
    low = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _total(
    weight,
    scales,
    rows,
    x,
    first_x,
    x_stride,
    blocks,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Products of 16 rows of the weight with a vector, for each of WARPS warps: [WARPS, 16].

    Warp w computes the part w % SPLITS of a product at place w // SPLITS. The places from COUNT on
    repeat the last one. weight: int32 words of rows with `blocks` blocks. rows: the row of each
    load, [CHUNKS * 2 * WARPS * 8]; element ((chunk * 2 + half) * WARPS + warp) * 8 + i belongs to
    row half * 8 + i of the warp. The vector of a place is the row first_x + place of x.

    The 4 lanes that share a row read 4 neighbouring blocks (a chunk) at once. A step of the matrix
    unit takes 8 neighbouring columns of each of these lanes, a word. The columns of a product are
    therefore in the order (chunk, word of the block, block, column of the word).
    """
    SIZE: tl.constexpr = rows.shape[0]
    WARPS: tl.constexpr = PLACES * SPLITS
    TYPE: tl.constexpr = x.dtype.element_ty
    # Lanes hold 8 numbers of the vector each. A row of 32 lanes keeps the vectors of warps apart.
    WIDE: tl.constexpr = 2 if CHUNKS > 1 else 1
    PARTS: tl.constexpr = CHUNKS // WIDE
    r = tl.arange(0, SIZE)
    place = r // (16 * WARPS) * SPLITS + r // 8 % WARPS % SPLITS  # chunk of each row, and
    own = tl.arange(0, PARTS * WARPS)  # of each part of the vector
    column = tl.arange(0, WIDE * 128)
    own_place = (own // WARPS * WIDE)[:, None] + (column // 128)[None, :]
    own_place = own_place * SPLITS + (own % WARPS % SPLITS)[:, None]
    own_x = first_x + tl.minimum(own % WARPS // SPLITS, COUNT - 1)
    k = own_place * 128 + (column % 128)[None, :]
    at = x + own_x[:, None] * x_stride + k
    word = place[:, None] * 16 + tl.arange(0, 16)[None, :]
    block = place[:, None] * 4 + tl.arange(0, 4)[None, :]
    word_at = weight + rows[:, None] * (blocks * 4) + word
    scale_at = scales + rows[:, None] * blocks + block
    total = tl.zeros([WARPS, 16, 8], tl.float32)
    words = tl.load(word_at, mask=word // 4 < blocks, other=0)
    powers = tl.load(scale_at, mask=block < blocks, other=0)
    if EARLY:
        gdc_wait()
    for first in range(0, blocks, 4 * CHUNKS * SPLITS):
        after = first + 4 * CHUNKS * SPLITS
        next_words = tl.load(word_at + after * 4, mask=word // 4 < blocks - after, other=0)
        next_powers = tl.load(scale_at + after, mask=block < blocks - after, other=0)
        v = tl.load(at + first * 32, mask=k < (blocks - first) * 32, other=0.0)
        v = tl.reshape(v, [PARTS, WARPS, WIDE, 4, 4, 2, 2, 2])
        v = tl.reshape(tl.permute(v, (1, 0, 2, 4, 6, 3, 7, 5)), [WARPS, CHUNKS * 128])
        v = tl.broadcast_to(v[:, :, None], [WARPS, CHUNKS * 128, 8])
        w = decode_words(words, powers, TYPE, FAST)
        w = tl.reshape(w, [CHUNKS, 2, WARPS, 8, 4, 4, 2, 2, 2])
        w = tl.permute(w, (2, 1, 3, 0, 5, 7, 4, 8, 6))
        w = tl.reshape(w, [WARPS, 16, CHUNKS * 128])
        total = tl.dot(w, v, total, input_precision="ieee")
        words, powers = next_words, next_powers
    return tl.max(total, axis=2)  # all columns are equal


@triton.jit
def _gate_up(
    x,
    weight,
    scales,
    bias,
    out,
    experts,
    inner,
    blocks,
    x_stride,
    alpha,
    limit,
    reduced,
    TOP_K: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """8 rows of the gate and the same rows of up, for one assignment."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # after gdc_wait, so `_down` may read the routing at once
    assignment = tl.program_id(1)
    first = tl.load(experts + assignment).to(tl.int64) * 2 * inner
    r = tl.arange(0, CHUNKS * 16 * SPLITS)
    n = tl.minimum(tl.program_id(0) * 8 + r % 8, inner - 1)
    rows = first + n + r // (8 * SPLITS) % 2 * inner
    total = _total(
        weight,
        scales,
        rows,
        x,
        assignment // TOP_K,
        x_stride,
        blocks,
        1,
        1,
        CHUNKS,
        SPLITS,
        FAST,
        False,
    )
    total = tl.sum(total, axis=0) * reduced
    gate, up = tl.split(tl.permute(tl.reshape(total, [2, 8]), (1, 0)))
    n = tl.program_id(0) * 8 + tl.arange(0, 8)
    inside = n < inner
    gate += tl.load(bias + first + n, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(bias + first + inner + n, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out + assignment * inner + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    hidden,
    weight,
    scales,
    bias,
    out,
    experts,
    factors,
    width,
    blocks,
    reduced,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """16 rows of down for each of the PLACES experts of a token, and their sum.

    Places without an expert repeat the last expert's product, which the sum leaves out.
    """
    WARPS: tl.constexpr = PLACES * SPLITS
    token = tl.program_id(1)
    r = tl.arange(0, CHUNKS * 16 * WARPS)
    place = tl.arange(0, PLACES)
    n = tl.program_id(0) * 16 + r // (8 * WARPS) % 2 * 8 + r % 8
    first = token * TOP_K
    own = first + tl.minimum(r // 8 % WARPS // SPLITS, TOP_K - 1)
    rows = tl.load(experts + own).to(tl.int64) * width + tl.minimum(n, width - 1)
    total = _total(
        weight,
        scales,
        rows,
        hidden,
        first,
        blocks * 32,
        blocks,
        TOP_K,
        PLACES,
        CHUNKS,
        SPLITS,
        FAST,
        EARLY,
    )
    total = tl.sum(tl.reshape(total, [PLACES, SPLITS, 16]), axis=1) * reduced
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = n < width
    kept = place < TOP_K
    expert = tl.load(experts + first + place, mask=kept, other=0).to(tl.int64)
    factor = tl.load(factors + first + place, mask=kept, other=0.0)
    read = kept[:, None] & inside[None, :]
    at = bias + expert[:, None] * width + n[None, :]
    total += tl.load(at, mask=read, other=0.0).to(tl.float32)
    value = tl.sum(tl.where(read, total * factor[:, None], 0.0), axis=0)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=inside)


def takes(x: Tensor) -> bool:
    """Whether these kernels compute with x's dtype: bfloat16, and any in Triton's interpreter."""
    return x.dtype == bfloat16 or knobs.runtime.interpret


def experts_of_few(
    x: Tensor,
    router: tuple[Tensor, Tensor | None],
    matrices: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor],
    semaphores: Tensor,
    top_k: int,
    renormalise: bool,
    alpha: float,
    limit: float,
    tiling: FewTiling = TILINGS[0],
) -> Tensor:
    """As MoeBackend.forward, in three launches. No host sync; the same result in every run.

    x: [T, H] that `takes` accepts, unit stride in H. router: the weight and its bias. matrices:
    codes of gate_up and down; scales: mxfp4_scales; biases: all as in ExpertWeights. semaphores: as
    in moe_few.experts_of_few. alpha, limit: as in ClampedSwiglu.
    """
    num_tokens, width = x.shape
    early, fast = overlaps(), not knobs.runtime.interpret
    reduced = _REDUCED if fast else 1.0
    gate_up, down = (matrix.view(int32) for matrix in matrices)
    blocks = [matrix.shape[2] for matrix in scales]
    inner = 32 * blocks[1]
    weights, experts = route_few(x, *router, semaphores, top_k, renormalise)
    hidden = x.new_empty((num_tokens * top_k, inner))
    _gate_up[(triton.cdiv(inner, 8), num_tokens * top_k)](
        x,
        gate_up,
        scales[0],
        biases[0],
        hidden,
        experts,
        inner,
        blocks[0],
        x.stride(0),
        alpha,
        limit,
        reduced,
        TOP_K=top_k,
        CHUNKS=tiling.gate_up.chunks,
        SPLITS=tiling.gate_up.splits,
        FAST=fast,
        EARLY=early,
        num_warps=tiling.gate_up.splits,
        num_stages=1,
        launch_pdl=early,
    )
    places = triton.next_power_of_2(top_k)
    out = x.new_empty((num_tokens, width))
    _down[(triton.cdiv(width, 16), num_tokens)](
        hidden,
        down,
        scales[1],
        biases[1],
        out,
        experts,
        weights,
        width,
        blocks[1],
        reduced,
        TOP_K=top_k,
        PLACES=places,
        CHUNKS=tiling.down.chunks,
        SPLITS=tiling.down.splits,
        FAST=fast,
        EARLY=early,
        num_warps=places * tiling.down.splits,
        num_stages=1,
        launch_pdl=early,
    )
    return out
