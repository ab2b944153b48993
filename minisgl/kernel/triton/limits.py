"""Device functions that search the limit of a filter: see minisgl.kernel.triton.filters.

A gap is (largest logit - logit) / T >= 0. The bits of gaps, read as int32, have the order of the
gaps.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl

from minisgl.kernel.triton.race import LOG2E, arrivals, exp2, log2


@triton.jit
def gaps(source, at, size, largest, inverse):
    value = tl.load(source + at, mask=at < size, other=float("-inf")).to(tl.float32)
    return (largest - value) * inverse


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def within(bits, amount, limit):
    return tl.where(bits <= limit, amount, 0.0)


@triton.jit
def _narrow(s1, s2, s3, target, low, high):
    """Return the quarter of (low, high] in which the total reaches target."""
    s1, s2, s3 = tl.reduce((s1, s2, s3), 0, _add3)
    span = high - low
    m1 = low + (span >> 2)
    m2 = low + (span >> 1)
    m3 = m1 + (span >> 1)
    below = tl.where(s2 >= target, m1, tl.where(s3 >= target, m2, m3))
    above = tl.where(s2 >= target, m2, tl.where(s3 >= target, m3, high))
    return tl.where(s1 >= target, low, below), tl.where(s1 >= target, m1, above)


@triton.jit
def search_list(bits, amount, target, high):
    """Return the least limit such that the amounts of all gaps up to it add up to `target` or more.

    The limit is an int32: the bits of a gap.
    bits, amount: one entry for each gap. The amounts of all gaps up to `high` reach the target.
    """
    low = high * 0 - 1
    while high - low > 1:
        span = high - low
        m1 = low + (span >> 2)
        s1 = within(bits, amount, m1)
        s2 = within(bits, amount, low + (span >> 1))
        s3 = within(bits, amount, m1 + (span >> 1))
        low, high = _narrow(s1, s2, s3, target, low, high)
    return high


@triton.jit
def search_row(
    source,
    size,
    largest,
    inverse,
    target,
    high,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return the same limit as search_list, for a row in memory."""
    low = high * 0 - 1
    while high - low > 1:
        span = high - low
        m1 = low + (span >> 2)
        s1 = tl.zeros([BLOCK], tl.float32)
        s2 = tl.zeros([BLOCK], tl.float32)
        s3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, 4 * BLOCK):
            at = start + tl.arange(0, 4)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            gap = gaps(source, at, size, largest, inverse)
            bits = gap.to(tl.int32, bitcast=True)
            amount = exp2(gap * -LOG2E, FAST) if WEIGHTED else tl.where(at < size, 1.0, 0.0)
            s1 += tl.sum(within(bits, amount, m1), axis=0)
            s2 += tl.sum(within(bits, amount, low + (span >> 1)), axis=0)
            s3 += tl.sum(within(bits, amount, m1 + (span >> 1)), axis=0)
        low, high = _narrow(s1, s2, s3, target, low, high)
    return high


@triton.jit
def draw_from_list(
    list_gaps,
    list_ids,
    found,
    ranks,
    top_p,
    whole,
    limit,
    floor,
    place,
    salt,
    TILE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Return the sampled token. ranks is 0 without top-k; top_p is above 1 without top-p."""
    at = tl.arange(0, TILE)
    gap = tl.load(list_gaps + at, mask=at < found, other=float("inf"))
    bits = gap.to(tl.int32, bitcast=True)
    mass = exp2(gap * -LOG2E, FAST)
    if ranks > 0.0:
        limit = search_list(bits, tl.where(at < found, 1.0, 0.0), ranks, limit)
        whole = tl.sum(within(bits, mass, limit), axis=0)
    if top_p < 1.0:
        limit = search_list(bits, mass, top_p * whole, limit)
    ids = tl.load(list_ids + at, mask=at < found, other=2147483647)
    score = gap * -LOG2E - log2(arrivals(ids, place, salt, FAST), FAST)
    score = tl.where(bits <= tl.minimum(limit, floor), score, float("-inf"))
    first = score == tl.max(score, axis=0)
    return tl.min(tl.where(first, ids, 2147483647), axis=0)
