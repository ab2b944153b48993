"""Decoding of 4-bit weights into an operand of the matrix unit.

As in mxfp4.py, a lane reads 16 bytes at once and decodes them to the numbers that the matrix unit
takes from this lane. minisgl.kernel.packed_order describes the order of the codes. With this order
the columns of the operand are in their natural order.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Final

import triton
import triton.language as tl
from torch import Tensor, bfloat16
from triton import knobs

from minisgl.kernel.triton.mxfp4 import decode_numbers, decode_pairs, join_pairs

# The factor by which products with decoded nvfp4 weights must be multiplied.
NVFP4_FACTOR: Final = 2.0**32


# Eight codes of $4, as pairs. A code in the low bits of the bfloat16 number 128 makes 128 + code.
# The sum has a factor of 1, because GPUs before Hopper have no bfloat16 sum without a product.
# $5: the header of the codes.
SCALED_ASM: Final = tl.constexpr(
    """
    {
    .reg .b32 c, one, zero, z, s;
    mov.b32 one, 0x3f803f80;
    mov.b32 zero, 0x80008000;
    prmt.b32 z, $5, $5, 0x1010;
    prmt.b32 s, $5, $5, 0x3232;
    lop3.b32 c, $4, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 c, c, one, z;
    fma.rn.bf16x2 $0, c, s, zero;
    shr.u32 c, $4, 4;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 c, c, one, z;
    fma.rn.bf16x2 $1, c, s, zero;
    shr.u32 c, $4, 8;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 c, c, one, z;
    fma.rn.bf16x2 $2, c, s, zero;
    shr.u32 c, $4, 12;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 c, c, one, z;
    fma.rn.bf16x2 $3, c, s, zero;
    }
    """
)
# $5: -128 - zero, twice.
SHIFTED_ASM: Final = tl.constexpr(
    """
    {
    .reg .b32 c, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 c, $4, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $0, c, one, $5;
    shr.u32 c, $4, 4;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $1, c, one, $5;
    shr.u32 c, $4, 8;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $2, c, one, $5;
    shr.u32 c, $4, 12;
    lop3.b32 c, c, 0x000f000f, 0x43004300, 0xea;
    fma.rn.bf16x2 $3, c, one, $5;
    }
    """
)
# $1: a header.
ZERO_ASM: Final = tl.constexpr("prmt.b32 $0, $1, $1, 0x1010;")


@triton.jit
def decode_chunk(
    words,
    headers,
    WARPS: tl.constexpr,
    REPEATS: tl.constexpr,
    NVFP4: tl.constexpr,
    SCALED: tl.constexpr,
    QUADS: tl.constexpr,
    TYPE: tl.constexpr,
    FAST: tl.constexpr,
):
    """One chunk of REPEATS * WARPS groups of 16 rows, decoded: [REPEATS * WARPS * 16, 128].

    words: int32 [REPEATS * 2 * WARPS * 8, 16]. Row ((repeat * 2 + half) * WARPS + warp) * 8 + i is
    row half * 8 + i of the warp's group. headers: int32 [rows, 1 or 4], of the same rows.

    The columns are in their natural order, or in that of `in_quads` if QUADS. Triton 3.6 passes the
    numbers through shared memory if it gives 4 neighbouring columns to a lane, as it does for the
    matrix unit of GPUs before Hopper, and QUADS is not set.
    """
    SIZE: tl.constexpr = words.shape[0]
    EACH: tl.constexpr = headers.shape[1]
    h = tl.broadcast_to(headers[:, None, :, None], [SIZE, 4, EACH, 4 // EACH])
    h = tl.reshape(h, [SIZE, 16])
    w = decode_nvfp4(words, h, TYPE, FAST) if NVFP4 else decode_int4(words, h, SCALED, TYPE, FAST)
    w = tl.reshape(w, [REPEATS, 2, WARPS, 8, 4, 4, 2, 2, 2])
    if QUADS:
        w = tl.permute(w, (0, 2, 1, 3, 5, 7, 4, 8, 6))
    else:
        w = tl.permute(w, (0, 2, 1, 3, 5, 7, 8, 4, 6))
    return tl.reshape(w, [SIZE, 128])


@triton.jit
def in_quads(x):
    """x [ROWS, 128] with its columns in the order of `decode_chunk` with QUADS."""
    ROWS: tl.constexpr = x.shape[0]
    v = tl.permute(tl.reshape(x, [ROWS, 8, 2, 4, 2]), (0, 1, 3, 2, 4))
    return tl.reshape(v, [ROWS, 128])


@triton.jit
def decode_int4(words, headers, SCALED: tl.constexpr, TYPE: tl.constexpr, FAST: tl.constexpr):
    """int4 to TYPE: code - zero, multiplied by the scale if SCALED.

    words, headers: int32 [ROWS, WORDS], the header of each word. Returns [ROWS, WORDS, 8]. FAST:
    for bfloat16 only. The difference is exact.
    """
    if FAST:
        ASM: tl.constexpr = SCALED_ASM if SCALED else SHIFTED_ASM
        if not SCALED:
            headers = tl.inline_asm_elementwise(
                ZERO_ASM, "=r,r", [headers], dtype=tl.int32, is_pure=True, pack=1
            )
        pairs = tl.inline_asm_elementwise(
            ASM,
            "=&r,=&r,=&r,=r,r,r",
            [words, headers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        numbers = join_pairs(*pairs)
    else:
        codes = (words[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 15
        wide = (
            codes.to(tl.float32) + 128.0 + (headers << 16).to(tl.float32, bitcast=True)[:, :, None]
        )
        if SCALED:
            wide *= scale_of(headers)[:, :, None]
        numbers = wide.to(TYPE)
    return numbers


@triton.jit
def decode_nvfp4(words, headers, TYPE: tl.constexpr, FAST: tl.constexpr):
    """nvfp4 to TYPE, 1 / NVFP4_FACTOR times the number times its scale. As decode_int4."""
    if FAST:
        first, last = tl.inline_asm_elementwise(
            "prmt.b32 $0, $2, $2, 0x1010; prmt.b32 $1, $2, $2, 0x3232;",
            "=&r,=r,r",
            [headers],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        numbers = decode_pairs(words, first, last)
    else:
        first = (headers << 16).to(tl.float32, bitcast=True)
        pair = tl.join(first, scale_of(headers))[:, :, None, :, None]
        ROWS: tl.constexpr = words.shape[0]
        WORDS: tl.constexpr = words.shape[1]
        scales = tl.reshape(tl.broadcast_to(pair, [ROWS, WORDS, 2, 2, 2]), [ROWS, WORDS, 8])
        # 2^-126 as a factor; the literal would be rounded to 0.
        numbers = (decode_numbers(words) * scales * 2.0**-126).to(TYPE)
    return numbers


@triton.jit
def scale_of(headers):
    """The scale in the upper half of each header, float32."""
    return (headers & -65536).to(tl.float32, bitcast=True)


def is_fast(x: Tensor) -> bool:
    """The argument FAST for weights that are multiplied with x."""
    return x.dtype == bfloat16 and not knobs.runtime.interpret
