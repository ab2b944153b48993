"""Samples from the tokens of a row that top-k, top-p and min-p keep, without sorting the row.

The gap of a token is (largest logit - logit) / T >= 0. Each filter keeps the tokens whose gap is at
most some limit. Non-negative floats have the order of their bits, so a limit is an integer that a
search finds exactly. There are three kernels:

1. _levels reads the rows, and counts the tokens and adds up the mass within four fixed gaps, for
   each part of a row.
2. _gather reads the rows again. The smallest of the four gaps that holds all tokens that the
   filters can keep bounds the candidates. These go to a list in the order of their ids; the counts
   say where each part of the row begins in the list.
3. _draw has one program for each row. It holds the list in registers and searches the limits; each
   step divides the range by four. Then it draws one of the kept tokens by the exponential race of
   race.py. If a row has more candidates than the list can hold, the program searches the row in
   memory instead. It reads the row about 12 times, so rows with many similar logits ("flat" rows)
   are slow.

Bytes: 2 B V elements, 311 MB at 256 x 151,936 float32: 74 us at 4.2 TB/s. Measured on one H200
with top-k 50 and top-p 0.9: _levels 55, _gather 62, _draw 45 us; flat rows 785 us in all.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float32, int32

from minisgl.kernel.sampling import SamplingTensors
from minisgl.kernel.triton.limits import draw_from_list, gaps, search_row, within
from minisgl.kernel.triton.race import LOG2E, arrivals, asks_filter, exp2, log2

_LIST = 8192
_SHORT_LIST = 2048
_PART_BLOCK = 512  # _levels and _gather take four times as many tokens in an iteration
_ROW_BLOCK = 2048
_INFINITY_BITS = tl.constexpr(0x7F800000)
_FIELDS = tl.constexpr(9)  # counts within the four levels, masses within them, mass of the row
_L0 = tl.constexpr(3.0)
_L1 = tl.constexpr(7.0)
_L2 = tl.constexpr(12.0)
_L3 = tl.constexpr(20.0)
_PARAMETERS = ["temperature", "top_ks", "top_ps", "min_ps"]


@triton.jit
def _widest(by_rank, by_mass, min_p):
    """The largest level. If min_p is the only filter, it is exactly the gap of min_p."""
    own = tl.abs(tl.log(tl.maximum(min_p, 1e-37)))
    return tl.where(by_rank | by_mass, _L3, tl.where(min_p > 0, own, 3.0e38))


@triton.jit(
    do_not_specialize=["tiles_per_split"],
    do_not_specialize_on_alignment=_PARAMETERS,
)
def _levels(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    largests,
    finite,
    partial,
    row_stride,
    vocab_size,
    tiles_per_split,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    degree = tl.load(temperature + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    if ((degree > 0) & asks_filter(top_k, top_p, min_p) & tl.load(finite + row)) == 0:
        return
    largest = tl.load(largests + row)
    inverse = 1.0 / tl.maximum(degree, 1e-37)
    source = logits + row.to(tl.int64) * row_stride
    last = _widest((top_k > 0) & (top_k < vocab_size), top_p < 1.0, min_p)
    c0 = tl.zeros([BLOCK], tl.float32)
    c1 = tl.zeros([BLOCK], tl.float32)
    c2 = tl.zeros([BLOCK], tl.float32)
    c3 = tl.zeros([BLOCK], tl.float32)
    m0 = tl.zeros([BLOCK], tl.float32)
    m1 = tl.zeros([BLOCK], tl.float32)
    m2 = tl.zeros([BLOCK], tl.float32)
    m3 = tl.zeros([BLOCK], tl.float32)
    whole = tl.zeros([BLOCK], tl.float32)
    lanes = tl.arange(0, 4)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    for tile in range(tiles_per_split):
        at = (split * tiles_per_split + tile) * 4 * BLOCK + lanes
        gap = gaps(source, at, vocab_size, largest, inverse)
        mass = exp2(gap * -LOG2E, FAST)
        c0 += tl.sum(tl.where(gap <= _L0, 1.0, 0.0), axis=0)
        c1 += tl.sum(tl.where(gap <= _L1, 1.0, 0.0), axis=0)
        c2 += tl.sum(tl.where(gap <= _L2, 1.0, 0.0), axis=0)
        c3 += tl.sum(tl.where(gap <= last, 1.0, 0.0), axis=0)
        m0 += tl.sum(tl.where(gap <= _L0, mass, 0.0), axis=0)
        m1 += tl.sum(tl.where(gap <= _L1, mass, 0.0), axis=0)
        m2 += tl.sum(tl.where(gap <= _L2, mass, 0.0), axis=0)
        m3 += tl.sum(tl.where(gap <= last, mass, 0.0), axis=0)
        whole += tl.sum(mass, axis=0)
    splits = tl.num_programs(0)
    out = partial + row * _FIELDS * splits + split
    tl.store(out, tl.sum(c0, axis=0))
    tl.store(out + splits, tl.sum(c1, axis=0))
    tl.store(out + 2 * splits, tl.sum(c2, axis=0))
    tl.store(out + 3 * splits, tl.sum(c3, axis=0))
    tl.store(out + 4 * splits, tl.sum(m0, axis=0))
    tl.store(out + 5 * splits, tl.sum(m1, axis=0))
    tl.store(out + 6 * splits, tl.sum(m2, axis=0))
    tl.store(out + 7 * splits, tl.sum(m3, axis=0))
    tl.store(out + 8 * splits, tl.sum(whole, axis=0))


@triton.jit
def _field(partial, splits, field, split, inside):
    return tl.load(partial + field * splits + split, mask=inside, other=0.0)


@triton.jit
def _choose_level(partial, splits, top_k, top_p, vocab_size, SPLITS: tl.constexpr):
    """Return the level that bounds the candidates, 4 if none does. partial: of one row."""
    split = tl.arange(0, SPLITS)
    inside = split < splits
    whole = tl.sum(_field(partial, splits, 8, split, inside), axis=0)
    ranks = tl.where((top_k > 0) & (top_k < vocab_size), top_k, 0).to(tl.float32)
    # A little more than top_p, since the list adds up the same terms in another order.
    mass = tl.where(top_p < 1.0, top_p + 2e-6, 0.0) * whole
    bound = (ranks == 0.0) & (top_p >= 1.0)  # min_p is the only filter: the last level is its gap
    level = 4
    for back in tl.static_range(4):
        count = tl.sum(_field(partial, splits, 3 - back, split, inside), axis=0)
        within = tl.sum(_field(partial, splits, 7 - back, split, inside), axis=0)
        holds = (count >= ranks) & (within >= mass) & ((back == 0) | (bound == 0))
        level = tl.where(holds, 3 - back, level)
    return level


@triton.jit(
    do_not_specialize=["tiles_per_split"],
    do_not_specialize_on_alignment=_PARAMETERS,
)
def _gather(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    largests,
    finite,
    partial,
    list_gaps,
    list_ids,
    row_stride,
    vocab_size,
    tiles_per_split,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    splits = tl.num_programs(0)
    degree = tl.load(temperature + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    if ((degree > 0) & asks_filter(top_k, top_p, min_p) & tl.load(finite + row)) == 0:
        return
    partial += row * _FIELDS * splits
    level = _choose_level(partial, splits, top_k, top_p, vocab_size, SPLITS)
    each = tl.arange(0, SPLITS)
    counts = _field(partial, splits, level, each, (each < splits) & (level < 4))
    if (level == 4) | (tl.sum(counts, axis=0) > CAPACITY):
        return
    found = tl.sum(tl.where(each < split, counts, 0.0), axis=0).to(tl.int32)
    last = _widest((top_k > 0) & (top_k < vocab_size), top_p < 1.0, min_p)
    cut = tl.where(level == 0, _L0, tl.where(level == 1, _L1, tl.where(level == 2, _L2, last)))
    largest = tl.load(largests + row)
    inverse = 1.0 / tl.maximum(degree, 1e-37)
    source = logits + row.to(tl.int64) * row_stride
    lanes = tl.arange(0, BLOCK)[:, None] * 4 + tl.arange(0, 4)[None, :]
    for tile in range(tiles_per_split):
        at = (split * tiles_per_split + tile) * 4 * BLOCK + lanes
        gap = gaps(source, at, vocab_size, largest, inverse)
        keep = ((gap <= cut) & (at < vocab_size)).to(tl.int32)
        of_four = tl.sum(keep, axis=1)  # summed inside a thread; later sums are over threads
        here = tl.sum(of_four, axis=0)
        if here > 0:
            before = found + tl.cumsum(of_four, axis=0) - of_four
            to = row * CAPACITY + before[:, None] + tl.cumsum(keep, axis=1) - 1
            tl.store(list_gaps + to, gap, mask=keep != 0)
            tl.store(list_ids + to, at, mask=keep != 0)
        found += here


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=[*_PARAMETERS, "seeds", "positions"],
)
def _draw(
    logits,
    temperature,
    top_ks,
    top_ps,
    min_ps,
    seeds,
    positions,
    largests,
    finite,
    partial,
    list_gaps,
    list_ids,
    tokens,
    row_stride,
    vocab_size,
    splits,
    CAPACITY: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0)
    degree = tl.load(temperature + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    if ((degree > 0) & asks_filter(top_k, top_p, min_p) & tl.load(finite + row)) == 0:
        return
    salt = tl.load(seeds + row)
    place = tl.load(positions + row)
    by_rank = (top_k > 0) & (top_k < vocab_size)
    by_mass = top_p < 1.0
    ranks = top_k.to(tl.float32)
    partial += row * _FIELDS * splits
    level = _choose_level(partial, splits, top_k, top_p, vocab_size, SPLITS)
    each = tl.arange(0, SPLITS)
    inside = (each < splits) & (level < 4)
    found = tl.sum(_field(partial, splits, level, each, inside), axis=0).to(tl.int32)
    whole = tl.sum(_field(partial, splits, 8, each, each < splits), axis=0)
    last = _widest(by_rank, by_mass, min_p)
    cut = tl.where(level == 2, _L2, tl.where(level == 3, last, float("inf")))
    cut = tl.where(level == 0, _L0, tl.where(level == 1, _L1, cut))
    limit = cut.to(tl.int32, bitcast=True)
    widest = tl.where(min_p > 0, tl.abs(tl.log(tl.maximum(min_p, 1e-37))), float("inf"))
    floor = tl.minimum(widest.to(tl.int32, bitcast=True), _INFINITY_BITS - 1)
    if (level < 4) & (found <= CAPACITY):
        lists = (list_gaps + row * CAPACITY, list_ids + row * CAPACITY, found)
        asked = (tl.where(by_rank, ranks, 0.0), tl.where(by_mass, top_p, 2.0))
        bounds = (whole, limit, floor)
        if found <= SHORT:
            token = draw_from_list(*lists, *asked, *bounds, place, salt, SHORT, FAST)
        else:
            token = draw_from_list(*lists, *asked, *bounds, place, salt, CAPACITY, FAST)
        tl.store(tokens + row, token)
        return
    source = logits + row.to(tl.int64) * row_stride
    largest = tl.load(largests + row)
    inverse = 1.0 / tl.maximum(degree, 1e-37)
    lanes = tl.arange(0, BLOCK)
    if by_rank:
        limit = search_row(source, vocab_size, largest, inverse, ranks, limit, False, BLOCK, FAST)
        kept = tl.zeros([BLOCK], tl.float32)
        for start in range(0, vocab_size, BLOCK):
            gap = gaps(source, start + lanes, vocab_size, largest, inverse)
            kept += within(gap.to(tl.int32, bitcast=True), exp2(gap * -LOG2E, FAST), limit)
        whole = tl.sum(kept, axis=0)
    if by_mass:
        limit = search_row(
            source, vocab_size, largest, inverse, top_p * whole, limit, True, BLOCK, FAST
        )
    limit = tl.minimum(limit, floor)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    best_id = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        ids = start + lanes
        gap = gaps(source, ids, vocab_size, largest, inverse)
        score = gap * -LOG2E - log2(arrivals(ids, place, salt, FAST), FAST)
        wins = (score > best) & (gap.to(tl.int32, bitcast=True) <= limit) & (ids < vocab_size)
        best = tl.where(wins, score, best)
        best_id = tl.where(wins, ids, best_id)
    first = best == tl.max(best, axis=0)
    tl.store(tokens + row, tl.min(tl.where(first, best_id, vocab_size - 1), axis=0))


def draw_filtered(
    logits: Tensor,
    params: SamplingTensors,
    largest: Tensor,
    finite: Tensor,
    tokens: Tensor,
    programs: int,
    fast: bool,
) -> None:
    """Overwrite `tokens` of the rows that sample at random with filters; keep the other rows.

    logits: [N, V]. largest: float32 [N], the maximum of each row. finite: bool [N]. tokens: int32
    [N].
    Three launches. Scratch: 64 KiB for each row. No host sync; graph-capturable.
    """
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, 4 * _PART_BLOCK)
    tiles_per_split = triton.cdiv(tiles, min(tiles, triton.cdiv(programs, num_rows)))
    splits = triton.cdiv(tiles, tiles_per_split)
    most_splits = triton.next_power_of_2(tiles)
    list_gaps = logits.new_empty((num_rows, _LIST), dtype=float32)
    list_ids = logits.new_empty((num_rows, _LIST), dtype=int32)
    partial = logits.new_empty((num_rows, _FIELDS.value, splits), dtype=float32)
    asked = (params.temperature, params.top_k, params.top_p, params.min_p)
    row = (largest, finite, partial)
    sizes = (logits.stride(0), vocab_size)
    _levels[(splits, num_rows)](
        logits, *asked, *row, *sizes, tiles_per_split, BLOCK=_PART_BLOCK, FAST=fast, num_warps=4
    )
    _gather[(splits, num_rows)](
        logits,
        *asked,
        *row,
        list_gaps,
        list_ids,
        *sizes,
        tiles_per_split,
        CAPACITY=_LIST,
        BLOCK=_PART_BLOCK,
        SPLITS=most_splits,
        num_warps=4,
    )
    _draw[(num_rows,)](
        logits,
        *asked,
        params.seed,
        params.position,
        *row,
        list_gaps,
        list_ids,
        tokens,
        *sizes,
        splits,
        CAPACITY=_LIST,
        SHORT=_SHORT_LIST,
        BLOCK=_ROW_BLOCK,
        SPLITS=most_splits,
        FAST=fast,
        num_warps=16,
    )
