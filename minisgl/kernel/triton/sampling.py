"""Sampling kernels: one pass over the logits samples all rows without filters.

Stage one: each of B * S programs reads its part of a row and writes its best group of ids, by the
largest logit or by a random draw. Stage two: one program for each row takes the best of the S
groups and then one id of that group. Both stages find unusable logits. They handle a row with
filters as a greedy row; minisgl.kernel.triton.filters then starts from the maximum of the row. With
tensor parallelism, each rank returns a candidate for each row, and one program for each row takes
the best candidate of all ranks.

Bytes: B V elements once. At 256 x 151,936 bfloat16 that is 77.8 MB, 18 us at 4.25 TB/s.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float32, int32
from torch import bool as torch_bool
from triton import knobs

from minisgl.kernel.sampling import GROUP, GROUP_STREAM, SampledTokens, SamplingTensors
from minisgl.kernel.triton.filters import draw_filtered
from minisgl.kernel.triton.race import LOG2E, arrivals, asks_filter, exp2, log2

_GROUPS = 256  # groups of ids that one program reads in one iteration
_PROGRAMS = 800  # about six for each of an H200's 132 multiprocessors
_NONE = tl.constexpr(2147483647)


_PARAMETERS = ["temperature", "top_k", "top_p", "min_p", "seed", "position"]
_PARTS = ["best_logit", "best_arrival", "best_group", "unusable"]


@triton.jit(
    do_not_specialize=["tiles_per_split", "first_id"],
    do_not_specialize_on_alignment=_PARAMETERS + _PARTS,
)
def _scan(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    best_logit,
    best_arrival,
    best_group,
    unusable,
    row_stride,
    vocab_size,
    tiles_per_split,
    first_id,
    GROUP: tl.constexpr,
    STREAM: tl.constexpr,
    GROUPS: tl.constexpr,
    FAST: tl.constexpr,
):
    split = tl.program_id(0)
    row = tl.program_id(1)
    degree = tl.load(temperature + row)
    filtered = asks_filter(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row))
    plain = (degree > 0) & (filtered == 0)
    inverse = LOG2E / tl.maximum(degree, 1e-37)
    source = logits + row.to(tl.int64) * row_stride
    group = split * tiles_per_split * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, GROUP)
    bad = tl.zeros([GROUPS], tl.int32)
    top = tl.full([GROUPS], float("-inf"), tl.float32)  # the largest logit of the best group
    arrival = tl.full([GROUPS], 1.0, tl.float32)  # of the best group, in units of exp(-top / T)
    top_tile = tl.zeros([GROUPS], tl.int32)
    if plain:
        salt = tl.load(seed + row)
        place = tl.load(position + row)
        for tile in range(tiles_per_split):
            tile_groups = group + tile * GROUPS
            ids = tile_groups[:, None] * GROUP + lane[None, :]
            value = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
            value = value.to(tl.float32)
            high = tl.max(value, axis=1)
            base = tl.where(high > float("-inf"), high, 0.0)
            weight = tl.sum(exp2((value - base[:, None]) * inverse, FAST), axis=1)
            bad = tl.where(weight < float("inf"), bad, 1)  # NaN, also from inf - inf
            tile_arrival = (
                arrivals(first_id // GROUP + tile_groups, place, salt, FAST, STREAM) / weight
            )
            wins = tile_arrival < arrival * exp2((high - top) * inverse, FAST)
            top = tl.where(wins, high, top)
            arrival = tl.where(wins, tile_arrival, arrival)
            top_tile = tl.where(wins, tile, top_tile)
    else:
        peak = tl.full([GROUPS, GROUP], float("-inf"), tl.float32)  # stays NaN after a NaN
        for tile in range(tiles_per_split):
            ids = (group + tile * GROUPS)[:, None] * GROUP + lane[None, :]
            value = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
            value = value.to(tl.float32)
            peak = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
            high = tl.max(value, axis=1)
            wins = high > top
            top = tl.where(wins, high, top)
            top_tile = tl.where(wins, tile, top_tile)
        bad = tl.max((peak < float("inf")).to(tl.int32) ^ 1, axis=1)
    largest = tl.max(top, axis=0)
    score = (top - largest) * inverse - log2(arrival, FAST)
    score = tl.where(top > float("-inf"), score, float("-inf"))
    score = tl.where(plain, score, top)
    is_best = score == tl.max(score, axis=0)
    top_group = group + top_tile * GROUPS
    chosen = tl.min(tl.where(is_best, top_group, _NONE), axis=0)
    picked = is_best & (top_group == chosen)
    at = row * tl.num_programs(0) + split
    tl.store(best_logit + at, tl.max(tl.where(picked, top, float("-inf")), axis=0))
    tl.store(best_arrival + at, tl.min(tl.where(picked, arrival, float("inf")), axis=0))
    tl.store(best_group + at, chosen)
    tl.store(unusable + at, tl.max(bad, axis=0))


@triton.jit(
    do_not_specialize=["splits", "first_id"],
    do_not_specialize_on_alignment=_PARAMETERS + _PARTS,
)
def _choose(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    seed,
    position,
    best_logit,
    best_arrival,
    best_group,
    unusable,
    tokens,
    finite,
    largest_out,
    row_stride,
    vocab_size,
    splits,
    first_id,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    FAST: tl.constexpr,
):
    """Choose the best of a row's groups, then one id of it.

    PART: `tokens` receives a candidate for each row, as local_candidate returns it; finite and
    largest_out are None.
    """
    row = tl.program_id(0)
    degree = tl.load(temperature + row)
    filtered = asks_filter(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row))
    plain = (degree > 0) & (filtered == 0)
    inverse = LOG2E / tl.maximum(degree, 1e-37)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    at = row * splits + split
    top = tl.load(best_logit + at, mask=inside, other=float("-inf"))
    arrival = tl.load(best_arrival + at, mask=inside, other=1.0)
    groups = tl.load(best_group + at, mask=inside, other=_NONE)
    bad = tl.max(tl.load(unusable + at, mask=inside, other=0), axis=0)
    largest = tl.max(top, axis=0)
    score = (top - largest) * inverse - log2(arrival, FAST)
    score = tl.where(top > float("-inf"), score, float("-inf"))
    score = tl.where(plain, score, top)
    best = tl.max(score, axis=0)
    is_best = (score == best) & inside
    group = tl.min(tl.where(is_best, groups, _NONE), axis=0)
    group = tl.where(group == _NONE, 0, group)
    ids = group * GROUP + tl.arange(0, GROUP)
    source = logits + row.to(tl.int64) * row_stride
    value = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf")).to(tl.float32)
    place = tl.load(position + row)
    noise = log2(arrivals(first_id + ids, place, tl.load(seed + row), FAST), FAST)
    drawn = (value - tl.max(value, axis=0)) * inverse - noise
    drawn = tl.where(value > float("-inf"), drawn, value)
    value = tl.where(plain, drawn, value)
    is_best = value == tl.max(value, axis=0)
    chosen = tl.min(tl.where(is_best, ids, _NONE), axis=0)
    token = first_id + tl.where(chosen == _NONE, 0, chosen)
    if PART:
        tl.store(tokens + row * 4, token)
        tl.store(tokens + row * 4 + 1, largest.to(tl.int32, bitcast=True))
        tl.store(tokens + row * 4 + 2, tl.where(plain, best, 0.0).to(tl.int32, bitcast=True))
        tl.store(tokens + row * 4 + 3, bad)
    else:
        tl.store(tokens + row, token)
        tl.store(finite + row, (bad == 0) & (largest > float("-inf")))
        tl.store(largest_out + row, largest)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperature"])
def _best_candidate(
    candidates,
    temperature,
    tokens,
    finite,
    num_rows,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    degree = tl.load(temperature + row)
    rank = tl.arange(0, BLOCK)
    inside = rank < RANKS
    at = candidates + (rank * num_rows + row) * 4
    ids = tl.load(at, mask=inside, other=_NONE)
    top = tl.load(at + 1, mask=inside, other=0).to(tl.float32, bitcast=True)
    top = tl.where(inside, top, float("-inf"))
    own = tl.load(at + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
    bad = tl.max(tl.load(at + 3, mask=inside, other=0), axis=0)
    largest = tl.max(top, axis=0)
    over = (top - largest) * (LOG2E / tl.maximum(degree, 1e-37)) + own
    score = tl.where(top > float("-inf"), tl.where(degree > 0, over, top), float("-inf"))
    is_best = inside & (score == tl.max(score, axis=0))
    chosen = tl.min(tl.where(is_best, ids, _NONE), axis=0)
    tl.store(tokens + row, tl.where(chosen == _NONE, 0, chosen))
    tl.store(finite + row, (bad == 0) & (largest > float("-inf")))


def sample(logits: Tensor, params: SamplingTensors) -> SampledTokens:
    """See the reference. Results may differ between candidates whose scores differ by rounding.

    logits: float32, bfloat16 or float16 [N, V] with V below 2**31, rows may be strided; not
    changed. Two launches, five with params.filters, for all values of the parameters.
    No host sync; graph-capturable over static tensors in `params`.
    """
    num_rows = len(logits)
    tokens = logits.new_empty(num_rows, dtype=int32)
    finite = logits.new_empty(num_rows, dtype=torch_bool)
    largest = logits.new_empty(num_rows, dtype=float32)
    if num_rows:
        _search(logits, params, 0, tokens, finite, largest)
        if params.filters:
            fast = not knobs.runtime.interpret
            draw_filtered(logits, params, largest, finite, tokens, _PROGRAMS, fast)
    return SampledTokens(tokens, finite)


def local_candidate(logits: Tensor, params: SamplingTensors, first_id: int) -> Tensor:
    """See the reference and `sample`. Filters are ignored; scores are in units of log 2."""
    candidates = logits.new_empty((len(logits), 4), dtype=int32)
    if len(logits):
        _search(logits, params, first_id, candidates, None, None)
    return candidates


def best_candidate(candidates: Tensor, params: SamplingTensors) -> SampledTokens:
    """See the reference. candidates: contiguous, of local_candidate above. One launch."""
    ranks, num_rows, _ = candidates.shape
    tokens = candidates.new_empty(num_rows)
    finite = candidates.new_empty(num_rows, dtype=torch_bool)
    if num_rows:
        _best_candidate[(num_rows,)](
            candidates,
            params.temperature,
            tokens,
            finite,
            num_rows,
            RANKS=ranks,
            BLOCK=triton.next_power_of_2(ranks),
            num_warps=1,
        )
    return SampledTokens(tokens, finite)


def _search(
    logits: Tensor,
    params: SamplingTensors,
    first_id: int,
    tokens: Tensor,
    finite: Tensor | None,
    largest: Tensor | None,
) -> None:
    """Fill tokens, finite and largest. If the last two are None, fill tokens with candidates."""
    num_rows, vocab_size = logits.shape
    tiles = triton.cdiv(vocab_size, GROUP * _GROUPS)
    tiles_per_split = triton.cdiv(tiles, min(tiles, triton.cdiv(_PROGRAMS, num_rows)))
    splits = triton.cdiv(tiles, tiles_per_split)
    best_logit = logits.new_empty((2, num_rows, splits), dtype=float32)
    best_group = logits.new_empty((2, num_rows, splits), dtype=int32)
    asked = (params.temperature, params.top_k, params.top_p, params.min_p)
    drawn = (*asked, params.seed, params.position)
    parts = (best_logit[0], best_logit[1], best_group[0], best_group[1])
    fast = not knobs.runtime.interpret
    _scan[(splits, num_rows)](
        logits,
        *drawn,
        *parts,
        logits.stride(0),
        vocab_size,
        tiles_per_split,
        first_id,
        GROUP=GROUP,
        STREAM=GROUP_STREAM,
        GROUPS=_GROUPS,
        FAST=fast,
        num_warps=4,
    )
    _choose[(num_rows,)](
        logits,
        *drawn,
        *parts,
        tokens,
        finite,
        largest,
        logits.stride(0),
        vocab_size,
        splits,
        first_id,
        GROUP=GROUP,
        BLOCK=triton.next_power_of_2(tiles),
        PART=finite is None,
        FAST=fast,
        num_warps=1,
    )
