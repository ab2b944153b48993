"""Device functions of sampling: Philox, and draws as an exponential race.

Gumbel-max takes argmax(logit / T + g) with g = -log(e) and e = -log1p(-u) exponential, which is
the token whose arrival e / exp(logit / T) comes first. So a token beats the best one so far when
e < e_best * exp((logit - logit_best) / T): one logarithm and one exponential each, no overflow
whatever T is, and no need to know the row's maximum beforehand.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

__all__ = ["asks_filter", "draw_arrival", "fast_log", "philox"]

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)
_LN2 = tl.constexpr(0.6931471805599453)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SMALL = tl.constexpr(0.0625)


@triton.jit
def philox(group, position, seed):
    """minisgl.kernel.philox4x32 on counter (group, position, 0, 0) under the key of `seed`.

    group: a tensor, position and seed: scalars. Returns four uint32 words of group's shape.
    """
    c0 = group.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, _M0)
        high1 = tl.umulhi(c2, _M1)
        low0 = tl.mul(c0, _M0, sanitize_overflow=False)
        low1 = tl.mul(c2, _M1, sanitize_overflow=False)
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 = tl.add(k0, _W0, sanitize_overflow=False)
        k1 = tl.add(k1, _W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def fast_log(x, FAST: tl.constexpr):
    """log(x) for normal x > 0; FAST is the hardware's lg2, absolute error 2^-22 around 1."""
    if FAST:
        two = tl.inline_asm_elementwise(
            "lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        result = two * _LN2
    else:
        result = tl.log(x)
    return result


@triton.jit
def draw_arrival(word, FAST: tl.constexpr):
    """-log1p(-u) for u = (word + 0.5) / 2^32, with the reference's rounding of u."""
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_BELOW_ONE)
    series = 0.16666667 + u * 0.14285715
    series = 0.2 + u * series
    series = 0.25 + u * series
    series = 0.33333334 + u * series
    series = 0.5 + u * series
    series = u + u * u * series
    return tl.where(u < _SMALL, series, -fast_log(1.0 - u, FAST))


@triton.jit
def asks_filter(top_k, top_p, min_p):
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
