"""Decoding of MXFP4 weights into an operand of the matrix unit.

A lane reads 16 bytes at once: a block of 32 weights, which has one scale. It decodes them to the
pairs of bfloat16 numbers that the matrix unit takes from this lane, so that no weight passes
through shared memory. The columns of both operands are therefore in another order than in memory:
that of `operand`, or of `column` in packed_blocks.py.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Final

import triton
import triton.language as tl
from torch import Tensor, bfloat16
from triton import knobs

_RESCALE: Final = 2.0**32


@triton.jit
def decode_words(words, scales, TYPE: tl.constexpr, FAST: tl.constexpr):
    """MXFP4 to TYPE.

    words: int32 [ROWS, WORDS], 8 codes each, in the order of minisgl.kernel.mxfp4_weights. scales:
    an integer type, [ROWS, WORDS / 4]. Returns [ROWS, WORDS, 8].

    FAST, for bfloat16 only: the numbers are 2^-32 times the weights. A pair has the bits of two
    bfloat16 numbers with another bias of the exponent. A product with the scale corrects the bias,
    also for the subnormal number 0.5. The numbers are exact for scales from 2^-94 to 2^33. Larger
    scales count as 2^33; with smaller ones, small numbers become zero.
    """
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    exponents = tl.broadcast_to(scales.to(tl.int32)[:, :, None], [ROWS, WORDS // 4, 4])
    exponents = tl.reshape(exponents, [ROWS, WORDS])
    if FAST:
        powers = (tl.minimum(exponents, 160) + 94) * 0x00800080  # 2^(exponent - 33), twice
        numbers = decode_pairs(words, powers, powers)
    else:
        # The exponent 0 is 2^-127, which is subnormal in float32.
        bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
        powers = bits.to(tl.float32, bitcast=True)
        numbers = (decode_numbers(words) * powers[:, :, None]).to(TYPE)
    return numbers


@triton.jit
def decode_pairs(words, first, last):
    """Codes in the order of `recode` to bfloat16, 2^-126 times the numbers times their scales.

    words: int32 [ROWS, WORDS]. first, last: as words; two bfloat16 scales for the pairs 0 and 1 of
    a word, and for the pairs 2 and 3. Returns [ROWS, WORDS, 8].
    """
    # The product adds -0, because GPUs before Hopper have no bfloat16 product without a sum.
    pairs = tl.inline_asm_elementwise(
        """
        {
        .reg .b32 m, n, zero;
        mov.b32 zero, 0x80008000;
        and.b32 m, $4, 0x81c081c0;
        fma.rn.bf16x2 $0, m, $5, zero;
        shf.l.wrap.b32 m, $4, $4, 10;
        and.b32 m, m, 0x81c081c0;
        fma.rn.bf16x2 $1, m, $5, zero;
        shl.b32 m, $4, 4;
        and.b32 m, m, 0x81c081c0;
        fma.rn.bf16x2 $2, m, $6, zero;
        shl.b32 m, $4, 6;
        shr.b32 n, $4, 2;
        lop3.b32 m, m, n, 0x81c081c0, 0x28;
        fma.rn.bf16x2 $3, m, $6, zero;
        }
        """,
        "=&r,=&r,=&r,=r,r,r,r",
        [words, first, last],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )
    return join_pairs(*pairs)


@triton.jit
def join_pairs(first, second, third, fourth):
    """The 8 bfloat16 numbers of the four pairs of a word, [ROWS, WORDS, 8]. Pairs: [ROWS, WORDS].

    The lower halves of the pairs are the first four numbers.
    """
    even = tl.join(_halves(first), _halves(third))
    odd = tl.join(_halves(second), _halves(fourth))
    return tl.reshape(tl.join(even, odd), [first.shape[0], first.shape[1], 8])


@triton.jit
def decode_numbers(words):
    """The numbers of codes in the order of `recode`, float32 [ROWS, WORDS, 8]."""
    w = words.to(tl.uint32, bitcast=True)
    even = tl.join(_codes(w), _codes(w << 4))
    odd = tl.join(_codes(w << 10 | w >> 22), _codes(w << 6 ^ w >> 2))
    return _number(tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1], 8]))


@triton.jit
def operand(
    words,
    scales,
    CHUNKS: tl.constexpr,
    WARPS: tl.constexpr,
    TYPE: tl.constexpr,
    FAST: tl.constexpr,
):
    """16 rows of the weight for each warp, decoded: [WARPS, 16, CHUNKS * 128].

    words: int32 [CHUNKS * 2 * WARPS * 8, 16]. Row ((chunk * 2 + half) * WARPS + warp) * 8 + i has
    128 columns of the row half * 8 + i of the warp. The 4 lanes that share a row read 4
    neighbouring blocks (a chunk) of it at once. scales: uint8, of the blocks.

    A step of the matrix unit takes 4 neighbouring columns of each of these lanes, which are half of
    a word: the codes i, i + 4, i + 1 and i + 5, where i is 0 or 2. The columns are therefore in the
    order (chunk, word of a block, half of a word, block, i or i + 1, code or code + 4). This order
    fits Triton 3.6. With another one the results are the same, but the weights pass through shared
    memory.
    """
    w = decode_words(words, scales, TYPE, FAST)
    w = tl.reshape(w, [CHUNKS, 2, WARPS, 8, 4, 4, 2, 2, 2])
    w = tl.permute(w, (2, 1, 3, 0, 5, 7, 4, 8, 6))
    return tl.reshape(w, [WARPS, 16, CHUNKS * 128])


@triton.jit
def _halves(pairs):
    """The two bfloat16 numbers in each int32, the lower half first."""
    low = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _codes(pairs):
    """The two e2m1 codes in each pair, int32, the lower half first."""
    low = (pairs >> 6 & 7) | (pairs >> 12 & 8)
    high = (pairs >> 22 & 7) | (pairs >> 28 & 8)
    return tl.join(low, high).to(tl.int32)


@triton.jit
def _number(code):
    """The numbers of e2m1 codes, int32, in float32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    doubled = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent - 1, 0))
    return tl.where((code & 8) != 0, -doubled, doubled).to(tl.float32) * 0.5


def is_fast(x: Tensor) -> bool:
    """The argument FAST of `decode_words` for weights that are multiplied with x."""
    return x.dtype == bfloat16 and not knobs.runtime.interpret


def rescale_factor(x: Tensor) -> float:
    """The factor by which the numbers of `decode_words` must be multiplied to get the weights."""
    return _RESCALE if is_fast(x) else 1.0
