"""Device functions of sampling: Philox, and draws as an exponential race.

The Gumbel-max trick takes argmax(logit / T + g) with g = -log(e), where e = -log1p(-u) is
exponentially distributed. That is the token with the smallest arrival e / exp(logit / T). So a
token beats the best one so far if e < e_best * exp((logit - logit_best) / T). For a group of
tokens, the sum of their exp(logit / T) takes the place of exp(logit / T). Each comparison needs one
logarithm and one exponential. It does not overflow for any T, and does not need the maximum of the
row.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)

_M0 = tl.constexpr(0xD2511F53)
_M1 = tl.constexpr(0xCD9E8D57)
_W0 = tl.constexpr(0x9E3779B9)
_W1 = tl.constexpr(0xBB67AE85)
_LARGEST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-24)
_SMALL = tl.constexpr(0.03125)


@triton.jit
def philox(group, position, seed, STREAM: tl.constexpr = 0):
    """minisgl.kernel.philox4x32 on counter (group, position, STREAM, 0) under the key of `seed`.

    group: a tensor; position, seed: scalars. Returns four uint32 words of the shape of group.
    """
    c0 = group.to(tl.uint32)
    c1 = tl.zeros_like(c0) + position.to(tl.uint32)
    c2 = tl.zeros_like(c0) + STREAM
    c3 = tl.zeros_like(c0)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    for _ in tl.static_range(10):
        product0 = c0.to(tl.uint64) * _M0  # one wide multiplication instead of two
        product1 = c2.to(tl.uint64) * _M1
        c0 = (product1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product1.to(tl.uint32)
        c3 = product0.to(tl.uint32)
        k0 = tl.add(k0, _W0, sanitize_overflow=False)
        k1 = tl.add(k1, _W1, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def log2(x, FAST: tl.constexpr):
    """log2(x) for normal x; FAST: by the hardware, with an absolute error of 2^-22 around 1."""
    if FAST:
        result = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.log2(x)
    return result


@triton.jit
def exp2(x, FAST: tl.constexpr):
    """2 to the power of x, for any x; FAST: by the hardware, which rounds tiny results to 0."""
    if FAST:
        result = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        result = tl.exp2(x)
    return result


@triton.jit
def draw_arrival(word, FAST: tl.constexpr):
    """-log2(1 - u) for u = (word + 0.5) / 2^32, with the reference's rounding of u.

    The base of the logarithm does not matter, because all arrivals have the same one. For small u
    a series is used, whose next term is below 1e-8.
    """
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, _LARGEST_BELOW_ONE)
    series = 0.36067376 + u * 0.28853901
    series = 0.48089835 + u * series
    series = 0.72134752 + u * series
    series = 1.44269504 + u * series
    return tl.where(u < _SMALL, u * series, 0.0 - log2(1.0 - u, FAST))


@triton.jit
def arrivals(ids, place, salt, FAST: tl.constexpr, STREAM: tl.constexpr = 0):
    """draw_arrival of single ids, of any shape and order.

    place: the position of the sampled token. salt: the seed of the request. For each id the
    function computes a Philox block of four words and uses one of them.
    """
    w0, w1, w2, w3 = philox(ids >> 2, place, salt, STREAM)
    low_half = tl.where((ids & 1) == 0, w0, w1)
    high_half = tl.where((ids & 1) == 0, w2, w3)
    return draw_arrival(tl.where((ids & 2) == 0, low_half, high_half), FAST)


@triton.jit
def asks_filter(top_k, top_p, min_p):
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
