"""e4m3 in Triton kernels: rounding vectors to it, and reading two adjacent elements at once.

The GPU converts two e4m3 values to float16 in one instruction. A conversion to bfloat16 takes one
more instruction for each element, at a sixteenth of the usual rate. Decode attention therefore
computes in float16, which holds every e4m3 value exactly. Experts convert weights to bfloat16 by
integer instructions (`widen`).
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


@triton.jit
def magnitude(x):
    """The bits of |x| as int32. They have the order of the magnitudes; NaN is the largest."""
    return tl.abs(x.to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def exponents_of(most):
    """The exponents of scales, with bias 127, and the inverses of the scales, as fp8.quantize.

    most: the largest `magnitude` of each vector. The inverse is NaN for infinity and NaN.
    """
    exponents = ((tl.minimum(most, 0x7F800000) + 0x1FFFFF) >> 23) - 8
    exponents = tl.maximum(exponents, 67)
    inverse = power_of_two(254 - exponents)
    return exponents, tl.where(most < 0x7F800000, inverse, float("nan"))


@triton.jit
def power_of_two(exponents):
    """float32 2 ** (exponents - 127)."""
    return (exponents << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_scale(exponents):
    """bfloat16 2 ** (exponents - 127)."""
    return (exponents << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def unpacked(pairs, CONVERT: tl.constexpr):
    """The elements at even and at odd positions, in float16.

    pairs    int16, two neighbouring e4m3 values each.
    CONVERT  whether to use the GPU's instruction. Triton's conversion of a tile from 8 to 16 bits
             loads each byte by an instruction of its own, so the kernels load 16 bits and convert
             them here. Triton's interpreter has no inline assembly.
    """
    if CONVERT:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted; .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    even = (pairs & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    odd = ((pairs >> 8) & 0xFF).to(tl.int8).to(tl.float8e4nv, bitcast=True)
    return even.to(tl.float16), odd.to(tl.float16)


@triton.jit
def widened_keys(pairs, CONVERT: tl.constexpr):
    """The elements of keys in float16, as two halves [K, D / 2].

    pairs    int16 [K, D / 2], two neighbouring e4m3 values each. The halves must be operands of
             matrix products that sum over D: a thread then holds pairs 2 j and 2 j + 1 together.
    CONVERT  as in `unpacked`. If true, one half has the elements of pairs 2 j, the other half those
             of pairs 2 j + 1, and no instruction has to sort bytes. Otherwise the halves are the
             elements at even and at odd positions.
    """
    if CONVERT:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 first, second;
            mov.b32 {first, second}, $2;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return unpacked(pairs, CONVERT)


@triton.jit
def widen(stored, TYPE: tl.constexpr, FAST: tl.constexpr):
    """e4m3 to TYPE, exactly.

    FAST, for bfloat16 only: integer instructions convert four numbers at once, and NaN becomes 480.
    The 4 bits of the exponent move to the low bits of bfloat16's exponent, and a product with 2^120
    corrects the bias, also of subnormal numbers. Triton's own conversion takes the hardware's
    conversion unit, whose rate would limit the bandwidth.
    """
    if FAST:
        wide = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, c, d, scale;
            mov.b32 scale, 0x7b807b80;
            prmt.b32 a, $2, 0, 0x1404;
            prmt.b32 b, $2, 0, 0x3424;
            shr.u32 c, a, 4;
            shr.u32 d, b, 4;
            and.b32 c, c, 0x07f007f0;
            and.b32 d, d, 0x07f007f0;
            lop3.b32 c, a, 0x80008000, c, 0xea;
            lop3.b32 d, b, 0x80008000, d, 0xea;
            mul.rn.bf16x2 $0, c, scale;
            mul.rn.bf16x2 $1, d, scale;
            }
            """,
            "=r,=r,r",
            [stored],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    else:
        wide = stored.to(TYPE)
    return wide
