"""One pass over the logits chooses greedy and plainly drawn tokens and finds unusable rows.

Stage one: each of B * S programs reads its part of a row and leaves its best candidate. Stage two:
one program for each row takes the best of the S. Rows with filters come out of both as greedy
rows; their maximum then feeds minisgl.kernel.triton.filters.

Bytes: B V elements once. At 256 x 151,936 float32 that is 155.6 MB, 37 us at 4.25 TB/s; measured
on one H200, greedy 44 us, drawn 71: some 35 instructions for each token, half of them Philox.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float32, int32
from torch import bool as torch_bool
from triton import knobs

from minisgl.kernel.sampling import SampledTokens, SamplingTensors
from minisgl.kernel.triton.filters import draw_filtered
from minisgl.kernel.triton.race import LOG2E, asks_filter, draw_arrival, exp2, log2, philox

_GROUPS = 512  # Philox calls of one program and iteration; four tokens each
_PROGRAMS = 800  # about six for each of an H200's 132 multiprocessors


_PARAMETERS = ["temperature", "top_k", "top_p", "min_p", "seed", "position"]
_PARTS = ["best_logit", "best_arrival", "best_id", "unusable"]


@triton.jit(
    do_not_specialize=["tiles_per_split"],
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
    best_id,
    unusable,
    row_stride,
    vocab_size,
    tiles_per_split,
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
    lane = tl.arange(0, 4)
    peak = tl.full([GROUPS, 4], float("-inf"), tl.float32)  # becomes NaN with the first NaN
    top = tl.full([GROUPS, 4], float("-inf"), tl.float32)
    arrival = tl.full([GROUPS, 4], 1.0, tl.float32)
    top_tile = tl.zeros([GROUPS, 4], tl.int32)
    if plain:
        salt = tl.load(seed + row)
        place = tl.load(position + row)
        for tile in range(tiles_per_split):
            ids = (group + tile * GROUPS)[:, None] * 4 + lane[None, :]
            value = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
            value = value.to(tl.float32)
            peak = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
            w0, w1, w2, w3 = philox(group + tile * GROUPS, place, salt)
            words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [GROUPS, 4])
            mine = draw_arrival(words, FAST)
            wins = mine < arrival * exp2((value - top) * inverse, FAST)
            top = tl.where(wins, value, top)
            arrival = tl.where(wins, mine, arrival)
            top_tile = tl.where(wins, tile, top_tile)
    else:
        for tile in range(tiles_per_split):
            ids = (group + tile * GROUPS)[:, None] * 4 + lane[None, :]
            value = tl.load(source + ids, mask=ids < vocab_size, other=float("-inf"))
            value = value.to(tl.float32)
            peak = tl.maximum(peak, value, propagate_nan=tl.PropagateNan.ALL)
            wins = value > top
            top = tl.where(wins, value, top)
            top_tile = tl.where(wins, tile, top_tile)
    top_id = (group[:, None] + top_tile * GROUPS) * 4 + lane[None, :]
    top_id = tl.where(top > float("-inf"), top_id, 0)
    largest = tl.max(tl.max(top, axis=1), axis=0)
    score = (top - largest) * inverse - log2(arrival, FAST)
    score = tl.where(top > float("-inf"), score, float("-inf"))
    score = tl.where(plain, score, top)
    best = tl.max(tl.max(score, axis=1), axis=0)
    first = score == best
    chosen = tl.min(tl.min(tl.where(first, top_id, vocab_size - 1), axis=1), axis=0)
    picked = first & (top_id == chosen)
    picked_top = tl.where(picked, top, float("-inf"))
    picked_arrival = tl.where(picked, arrival, float("inf"))
    at = row * tl.num_programs(0) + split
    tl.store(best_logit + at, tl.max(tl.max(picked_top, axis=1), axis=0))
    tl.store(best_arrival + at, tl.min(tl.min(picked_arrival, axis=1), axis=0))
    tl.store(best_id + at, chosen)
    bad = (peak < float("inf")).to(tl.int32) ^ 1
    tl.store(unusable + at, tl.max(tl.max(bad, axis=1), axis=0))


@triton.jit(
    do_not_specialize=["splits"],
    do_not_specialize_on_alignment=_PARAMETERS[:4] + _PARTS,
)
def _choose(
    temperature,
    top_k,
    top_p,
    min_p,
    best_logit,
    best_arrival,
    best_id,
    unusable,
    tokens,
    finite,
    largest_out,
    splits,
    BLOCK: tl.constexpr,
    FAST: tl.constexpr,
):
    row = tl.program_id(0)
    degree = tl.load(temperature + row)
    filtered = asks_filter(tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row))
    inverse = LOG2E / tl.maximum(degree, 1e-37)
    split = tl.arange(0, BLOCK)
    inside = split < splits
    at = row * splits + split
    top = tl.load(best_logit + at, mask=inside, other=float("-inf"))
    arrival = tl.load(best_arrival + at, mask=inside, other=1.0)
    ids = tl.load(best_id + at, mask=inside, other=2147483647)
    bad = tl.max(tl.load(unusable + at, mask=inside, other=0), axis=0)
    largest = tl.max(top, axis=0)
    score = (top - largest) * inverse - log2(arrival, FAST)
    score = tl.where(top > float("-inf"), score, float("-inf"))
    score = tl.where((degree > 0) & (filtered == 0), score, top)
    first = (score == tl.max(score, axis=0)) & inside
    chosen = tl.min(tl.where(first, ids, 2147483647), axis=0)
    chosen = tl.where(chosen == 2147483647, 0, chosen)
    tl.store(tokens + row, chosen)
    tl.store(finite + row, (bad == 0) & (largest > float("-inf")))
    tl.store(largest_out + row, largest)


def sample(logits: Tensor, params: SamplingTensors) -> SampledTokens:
    """As the reference, except between candidates whose scores differ by rounding alone.

    logits: float32, bfloat16 or float16 [N, V] with V below 2**31, rows may be strided; not
    changed. Two launches, three with params.filters; none depends on what the parameters hold.
    No host sync; graph-capturable over static tensors in `params`.
    """
    num_rows, vocab_size = logits.shape
    tokens = logits.new_empty(num_rows, dtype=int32)
    finite = logits.new_empty(num_rows, dtype=torch_bool)
    if num_rows == 0:
        return SampledTokens(tokens, finite)
    tiles = triton.cdiv(vocab_size, 4 * _GROUPS)
    tiles_per_split = triton.cdiv(tiles, min(tiles, triton.cdiv(_PROGRAMS, num_rows)))
    splits = triton.cdiv(tiles, tiles_per_split)
    best_logit = logits.new_empty((2, num_rows, splits), dtype=float32)
    best_id = logits.new_empty((2, num_rows, splits), dtype=int32)
    largest = logits.new_empty(num_rows, dtype=float32)
    asked = (params.temperature, params.top_k, params.top_p, params.min_p)
    parts = (best_logit[0], best_logit[1], best_id[0], best_id[1])
    fast = not knobs.runtime.interpret
    _scan[(splits, num_rows)](
        logits,
        *asked,
        params.seed,
        params.position,
        *parts,
        logits.stride(0),
        vocab_size,
        tiles_per_split,
        GROUPS=_GROUPS,
        FAST=fast,
        num_warps=4,
    )
    block = triton.next_power_of_2(tiles)
    _choose[(num_rows,)](
        *asked, *parts, tokens, finite, largest, splits, BLOCK=block, FAST=fast, num_warps=1
    )
    if params.filters:
        draw_filtered(logits, params, largest, finite, tokens, _PROGRAMS, fast)
    return SampledTokens(tokens, finite)
