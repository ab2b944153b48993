"""Draws from what top-k, top-p and min-p leave of a row: one program for each row, no sort.

With gap y = (largest - logit) / T >= 0 every filter keeps the tokens of gap at most some limit,
and non-negative floats order like their bits: limits are integers that a search finds exactly.

1. Read the row: count and mass inside four widths. The narrowest that holds what is asked for
   bounds the candidates.
2. Read the row again: copy the candidates to a list. A row with more than the list holds is
   searched in place, at a read of the row for each step.
3. Search the limits in the list, four parts at a time: at most 16 steps for each of top-k, top-p.
4. Race over what is left.

Bytes: 2 B V elements, 311 MB at 256 x 151,936 float32: 74 us at 4.2 TB/s, plus some 30 us.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from minisgl.kernel.sampling import SamplingTensors
from minisgl.kernel.triton.race import asks_filter, draw_arrival, fast_log, philox

__all__ = ["draw_filtered"]

_LIST = 8192
_WARPS = 16
_INFINITY_BITS = tl.constexpr(0x7F800000)
# Widths in nats: exp(-w) of the largest probability is left out.
_W1 = tl.constexpr(3.0)
_W2 = tl.constexpr(7.0)
_W3 = tl.constexpr(12.0)
_W4 = tl.constexpr(20.0)


@triton.jit
def _row_gaps(source, at, mask, largest, inverse):
    value = tl.load(source + at, mask=mask, other=float("-inf")).to(tl.float32)
    return (largest - value) * inverse


@triton.jit
def _gaps(source, listed, at, size, fits, largest, inverse):
    """Gaps number `at` of the list, or of the row where the list did not hold them all."""
    inside = at < size
    mine = tl.load(listed + at, mask=inside & fits, other=float("inf"))
    whole = _row_gaps(source, at, inside & (fits == 0), largest, inverse)
    return tl.where(fits, mine, whole)


@triton.jit
def _measure(gap, limit, WEIGHTED: tl.constexpr):
    """1 or exp(-gap) where the gap's bits are at most limit, else 0."""
    amount = tl.exp(-gap) if WEIGHTED else tl.full(gap.shape, 1.0, tl.float32)
    return tl.where(gap.to(tl.int32, bitcast=True) <= limit, amount, 0.0)


@triton.jit
def _total(
    source, listed, size, fits, largest, inverse, limit, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += _measure(_gaps(source, listed, at, size, fits, largest, inverse), limit, WEIGHTED)
    return tl.sum(total, axis=0)


@triton.jit
def _search(
    source,
    listed,
    size,
    fits,
    largest,
    inverse,
    target,
    high,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Least limit at which the total reaches target; at `high` it is known to."""
    low = high * 0 - 1
    while high - low > 1:
        span = high - low
        m1 = low + (span >> 2)
        m2 = low + (span >> 1)
        m3 = m1 + (span >> 1)
        s1 = tl.zeros([BLOCK], tl.float32)
        s2 = tl.zeros([BLOCK], tl.float32)
        s3 = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            at = start + tl.arange(0, BLOCK)
            gap = _gaps(source, listed, at, size, fits, largest, inverse)
            s1 += _measure(gap, m1, WEIGHTED)
            s2 += _measure(gap, m2, WEIGHTED)
            s3 += _measure(gap, m3, WEIGHTED)
        reach1 = tl.sum(s1, axis=0) >= target
        reach2 = tl.sum(s2, axis=0) >= target
        reach3 = tl.sum(s3, axis=0) >= target
        high = tl.where(reach1, m1, tl.where(reach2, m2, tl.where(reach3, m3, high)))
        low = tl.where(reach1, low, tl.where(reach2, m1, tl.where(reach3, m2, m3)))
    return high


@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature",
        "top_ks",
        "top_ps",
        "min_ps",
        "seeds",
        "positions",
    ]
)
def _draw_filtered(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    largests,
    finite,
    list_gaps,
    list_ids,
    tokens,
    row_stride,
    vocab_size,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0)
    degree = tl.load(temperature + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    usable = tl.load(finite + row) != 0
    if ((degree > 0) & asks_filter(top_k, top_p, min_p) & usable) == 0:
        return
    largest = tl.load(largests + row)
    inverse = 1.0 / tl.maximum(degree, 1e-37)
    source = logits + row.to(tl.int64) * row_stride
    listed = list_gaps + row * CAPACITY
    listed_ids = list_ids + row * CAPACITY
    by_rank = (top_k > 0) & (top_k < vocab_size)
    by_mass = top_p < 1.0
    widest = tl.where(min_p > 0, tl.abs(tl.log(tl.maximum(min_p, 1e-37))), float("inf"))

    # 1. Count and mass inside each width. Rows of the tile add up inside a thread.
    lanes = tl.arange(0, BLOCK)
    c1 = tl.zeros([BLOCK], tl.float32)
    c2 = tl.zeros([BLOCK], tl.float32)
    c3 = tl.zeros([BLOCK], tl.float32)
    c4 = tl.zeros([BLOCK], tl.float32)
    p1 = tl.zeros([BLOCK], tl.float32)
    p2 = tl.zeros([BLOCK], tl.float32)
    p3 = tl.zeros([BLOCK], tl.float32)
    p4 = tl.zeros([BLOCK], tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    cut = widest
    if by_rank | by_mass:
        for start in range(0, vocab_size, 4 * BLOCK):
            at = start + tl.arange(0, 4)[:, None] * BLOCK + lanes[None, :]
            gap = _row_gaps(source, at, at < vocab_size, largest, inverse)
            weight = tl.exp(-gap)
            c1 += tl.sum(tl.where(gap <= _W1, 1.0, 0.0), axis=0)
            c2 += tl.sum(tl.where(gap <= _W2, 1.0, 0.0), axis=0)
            c3 += tl.sum(tl.where(gap <= _W3, 1.0, 0.0), axis=0)
            c4 += tl.sum(tl.where(gap <= _W4, 1.0, 0.0), axis=0)
            p1 += tl.sum(tl.where(gap <= _W1, weight, 0.0), axis=0)
            p2 += tl.sum(tl.where(gap <= _W2, weight, 0.0), axis=0)
            p3 += tl.sum(tl.where(gap <= _W3, weight, 0.0), axis=0)
            p4 += tl.sum(tl.where(gap <= _W4, weight, 0.0), axis=0)
            whole += tl.sum(weight, axis=0)
        ranks = tl.where(by_rank, top_k, 0).to(tl.float32)
        # A little more than asked for: the list adds up the same terms in another order.
        mass = tl.where(by_mass, top_p + 2e-6, 0.0) * tl.sum(whole, axis=0)
        holds1 = (tl.sum(c1, axis=0) >= ranks) & (tl.sum(p1, axis=0) >= mass)
        holds2 = (tl.sum(c2, axis=0) >= ranks) & (tl.sum(p2, axis=0) >= mass)
        holds3 = (tl.sum(c3, axis=0) >= ranks) & (tl.sum(p3, axis=0) >= mass)
        holds4 = (tl.sum(c4, axis=0) >= ranks) & (tl.sum(p4, axis=0) >= mass)
        cut = tl.where(holds4, _W4, float("inf"))
        cut = tl.where(holds3, _W3, cut)
        cut = tl.where(holds2, _W2, cut)
        cut = tl.where(holds1, _W1, cut)

    # 2. The list of candidates, in the order of their ids.
    found = 0
    for start in range(0, vocab_size, 2 * BLOCK):
        at = start + tl.arange(0, 2 * BLOCK)
        gap = _row_gaps(source, at, at < vocab_size, largest, inverse)
        keep = ((gap <= cut) & (at < vocab_size)).to(tl.int32)
        here = tl.sum(keep, axis=0)
        if (here > 0) & (found + here <= CAPACITY):
            to = found + tl.cumsum(keep, axis=0) - 1
            tl.store(listed + to, gap, mask=keep != 0)
            tl.store(listed_ids + to, at, mask=keep != 0)
        found += here
    tl.debug_barrier()  # what other threads of this program wrote is read below
    fits = found <= CAPACITY
    size = tl.where(fits, found, vocab_size)

    # 3. The limits.
    limit = cut.to(tl.int32, bitcast=True)
    if by_rank:
        limit = _search(
            source, listed, size, fits, largest, inverse, top_k.to(tl.float32), limit, False, BLOCK
        )
    if by_mass:
        if by_rank:
            base = _total(source, listed, size, fits, largest, inverse, limit, True, BLOCK)
        else:
            base = tl.sum(whole, axis=0)
        limit = _search(
            source, listed, size, fits, largest, inverse, top_p * base, limit, True, BLOCK
        )
    limit = tl.minimum(limit, widest.to(tl.int32, bitcast=True))
    limit = tl.minimum(limit, _INFINITY_BITS - 1)  # masked tokens never race

    # 4. The race.
    salt = tl.load(seeds + row)
    place = tl.load(positions + row)
    best_gap = tl.full([BLOCK], float("inf"), tl.float32)
    arrival = tl.full([BLOCK], 1.0, tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        at = start + tl.arange(0, BLOCK)
        gap = _gaps(source, listed, at, size, fits, largest, inverse)
        ids = tl.load(listed_ids + at, mask=(at < size) & fits, other=0)
        ids = tl.where(fits, ids, at)
        w0, w1, w2, w3 = philox(ids >> 2, place, salt)
        low_half = tl.where((ids & 1) == 0, w0, w1)
        high_half = tl.where((ids & 1) == 0, w2, w3)
        mine = draw_arrival(tl.where((ids & 2) == 0, low_half, high_half), FAST)
        wins = mine < arrival * tl.exp(best_gap - gap)
        wins = wins & (gap.to(tl.int32, bitcast=True) <= limit) & (at < size)
        best_gap = tl.where(wins, gap, best_gap)
        arrival = tl.where(wins, mine, arrival)
        best_id = tl.where(wins, ids, best_id)
    score = -best_gap - fast_log(arrival, FAST)
    first = score == tl.max(score, axis=0)
    tl.store(tokens + row, tl.min(tl.where(first, best_id, vocab_size - 1), axis=0))


def draw_filtered(
    logits: Tensor,
    params: SamplingTensors,
    largest: Tensor,
    finite: Tensor,
    tokens: Tensor,
    fast: bool,
) -> None:
    """Overwrite `tokens` of the rows that draw with filters; others are left as they are.

    logits: [N, V]; largest: float32 [N], each row's maximum; finite: bool [N]; tokens: int32 [N].
    Scratch: 64 KiB for each row. No host sync; graph-capturable.
    """
    num_rows, vocab_size = logits.shape
    list_gaps = logits.new_empty((num_rows, _LIST), dtype=float32)
    list_ids = logits.new_empty((num_rows, _LIST), dtype=int32)
    _draw_filtered[(num_rows,)](
        logits,
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        params.seed,
        params.position,
        largest,
        finite,
        list_gaps,
        list_ids,
        tokens,
        logits.stride(0),
        vocab_size,
        CAPACITY=_LIST,
        BLOCK=2048,
        FAST=fast,
        num_warps=_WARPS,
    )
