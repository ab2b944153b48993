"""The kernels of minisgl.kernel.drafts: n-gram drafts from the token pool, and their verification.

find_drafts reads each token of a row and of its prediction once from memory. Its first kernel
searches pieces of rows in parallel, and its second kernel writes the drafts. Neither knows on the
host how long a row is: the programs of a short row end at once. Bytes read: 4 for each token. Both
kernels and accept_drafts move little data, so their time is mostly the latency of a launch.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from torch import bool as torch_bool

from minisgl.kernel.drafts import LONG_MATCH, MAX_MATCH, MIN_MATCH, Accepted

_TILE = 1024  # tokens that a program compares at once
_PROGRAMS = 1024  # the most programs that search, over all rows
_MOST_PARTS = 64  # the most programs that search one row
# A program compares this many tokens at all places of a tile. If they are equal at a place, it
# compares further groups of as many tokens. Divides MAX_MATCH.
_NEAR = 4
_ELEMENTS = 256  # requests times tokens of one program of accept_drafts
_REQ_FIELDS = ["rows", "lengths", "found", "predicted"]  # views into the step, of any alignment


@triton.jit
def _best_match(
    source,
    last,
    first,
    end,
    columns,
    best,
    least,
    MAX: tl.constexpr,
    NEAR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the larger of `best` and the matches that end in this program's part of [first, end).

    A match does not begin before `first`. The number of a match is its size * columns + its end.
    """
    for base in range(first + tl.program_id(1) * TILE, end, tl.num_programs(1) * TILE):
        place = base + tl.arange(0, TILE)
        matched = place < end
        size = tl.zeros([TILE], tl.int32)
        for back in tl.static_range(NEAR):
            matched = matched & (place - first >= back) & (last >= back)
            wanted = tl.load(source + tl.maximum(last - back, 0))
            matched = matched & (tl.load(source + place - back, mask=matched, other=-1) == wanted)
            size += matched.to(tl.int32)
        if tl.max(size, axis=0) == NEAR:
            for group in range(NEAR, MAX, NEAR):
                # No load of a group waits for a comparison, so all are in flight together.
                for nth in tl.static_range(NEAR):
                    far = group + nth
                    inside = (place < end) & (place - first >= far) & (last >= far)
                    wanted = tl.load(source + tl.maximum(last - far, 0))
                    token = tl.load(source + place - far, mask=inside, other=-1)
                    matched = matched & (token == wanted)
                    size += matched.to(tl.int32)
        best = tl.maximum(best, tl.where(size >= least, size * columns + place, -1))
    return best


@triton.jit(do_not_specialize_on_alignment=["rows"])
def _find_matches(
    token_pool,
    rows,
    cached,
    tails,
    matches,
    made,
    pool_stride,
    columns,
    width,
    HAS_MADE: tl.constexpr,
    MAX: tl.constexpr,
    MIN: tl.constexpr,
    LONG: tl.constexpr,
    NEAR: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the best match of each piece of a row: its size * columns + its end, or -1."""
    req = tl.program_id(0)
    row = tl.load(rows + req).to(tl.int64)
    last = tl.load(cached + row)
    tail = tl.maximum(tl.load(tails + row), last + 1 + width)
    source = token_pool + row * pool_stride
    least = MIN
    if HAS_MADE:
        least = tl.where(tl.load(made + row) > 0, LONG, MIN)
    best = tl.full([TILE], -1, tl.int32)
    best = _best_match(source, last, 0, last, columns, best, least, MAX, NEAR, TILE)
    best = _best_match(source, last, tail, columns - 1, columns, best, least, MAX, NEAR, TILE)
    at = req * tl.num_programs(1) + tl.program_id(1)
    tl.store(matches + at, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["parts"], do_not_specialize_on_alignment=_REQ_FIELDS)
def _write_drafts(
    token_pool,
    rows,
    cached,
    lengths,
    found,
    predicted,
    matches,
    made,
    parts,
    pool_stride,
    columns,
    width,
    HAS_MADE: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    req = tl.program_id(0)
    row = tl.load(rows + req).to(tl.int64)
    last = tl.load(cached + row)
    source = token_pool + row * pool_stride
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(matches + req * parts + part, mask=part < parts, other=-1), axis=0)
    end = tl.where(best >= 0, best % columns, last - 1)  # without a match the last token repeats
    period = tl.where(end > last, columns - 1, last) - end
    count = tl.load(lengths + req)
    nth = tl.arange(0, WIDTH)
    target = last + 1 + nth
    written = (nth < count) & (nth < width) & (target < columns)
    without = 0
    if HAS_MADE:  # without a match the drafts of the draft head stay
        written = written & (best >= 0)
        without = tl.minimum(tl.load(made + row), count)
    draft = tl.load(source + end + 1 + nth % period, mask=written)
    tl.store(source + target, draft, mask=written)
    tl.store(found + req, tl.where(best >= 0, count, without))
    tl.store(predicted + req, (end > last).to(tl.int32))


@triton.jit(
    do_not_specialize=["num_reqs", "num_decode"],
    do_not_specialize_on_alignment=[*_REQ_FIELDS, "samples", "first", "drawn", "finite"],
)
def _accept_drafts(
    token_pool,
    rows,
    cached,
    lengths,
    samples,
    found,
    first,
    drawn,
    finite,
    tokens_out,
    counts_out,
    agreed_out,
    finite_out,
    num_reqs,
    num_decode,
    pool_stride,
    columns,
    width,
    REQS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    req = tl.program_id(0) * REQS + tl.arange(0, REQS)
    exists = req < num_reqs
    decodes = req < num_decode
    row = tl.load(rows + req, mask=exists, other=0).to(tl.int64)
    length = tl.load(lengths + req, mask=exists, other=1)
    start = tl.load(cached + row, mask=exists, other=0)
    draws = tl.where(decodes, length, 1)[:, None]
    drafted = tl.load(found + req, mask=exists & decodes, other=0)[:, None]
    nth = tl.arange(0, WIDTH)[None, :]
    inside = exists[:, None] & (nth < width)
    index = tl.load(first + req, mask=exists, other=0)[:, None]
    token = tl.load(drawn + index + tl.minimum(nth, draws - 1), mask=inside, other=0)
    usable = tl.load(finite + index + tl.minimum(nth, draws - 1), mask=inside, other=0)
    next_usable = tl.load(finite + index + tl.minimum(nth + 1, draws - 1), mask=inside, other=0)
    position = (start + tl.where(decodes, 1, length))[:, None] + nth
    pool_at = token_pool + row[:, None] * pool_stride + tl.minimum(position, columns - 1)
    equal = token == tl.load(pool_at, mask=inside, other=0)
    equal = equal & inside & (nth < drafted) & (nth < draws)
    agreed = tl.min(tl.where(equal, WIDTH, nth), axis=1)
    follows = equal & (next_usable != 0) & (nth + 1 < draws) & (nth + 1 < width)
    count = 1 + tl.min(tl.where(follows, WIDTH, nth), axis=1)
    count = tl.where(tl.load(samples + req, mask=exists, other=0) != 0, count, 0)
    kept = inside & (nth < count[:, None])
    tl.debug_barrier()  # several threads load each draft and each start, before one overwrites it
    tl.store(pool_at, token, mask=kept & (position < columns))
    tl.store(cached + row, start + tl.where(decodes, count, length), mask=exists)
    tl.store(tokens_out + req[:, None] * width + nth, token, mask=inside)
    tl.store(counts_out + req, count, mask=exists)
    tl.store(agreed_out + req, agreed, mask=exists)
    tl.store(finite_out + req[:, None] + nth, usable, mask=inside & (nth == 0))


def find_drafts(
    token_pool: Tensor,
    rows: Tensor,
    cached: Tensor,
    tails: Tensor,
    lengths: Tensor,
    width: int,
    found: Tensor,
    predicted: Tensor,
    made: Tensor | None = None,
) -> None:
    """As the reference. Two launches; no host sync; graph-capturable.

    (MAX_MATCH + 1) * (max_seq_len + 1) is below 2^31. Requests of one row write the same drafts, if
    their lengths are equal.
    """
    reqs, columns = len(rows), token_pool.shape[1]
    if not reqs:
        return
    parts = min(triton.cdiv(columns, _TILE), max(_PROGRAMS // reqs, 1), _MOST_PARTS)
    matches = rows.new_empty(reqs * parts)
    _find_matches[(reqs, parts)](
        token_pool,
        rows,
        cached,
        tails,
        matches,
        cached if made is None else made,
        token_pool.stride(0),
        columns,
        width,
        HAS_MADE=made is not None,
        MAX=MAX_MATCH,
        MIN=MIN_MATCH,
        LONG=LONG_MATCH,
        NEAR=_NEAR,
        TILE=_TILE,
        num_warps=8,
    )
    _write_drafts[(reqs,)](
        token_pool,
        rows,
        cached,
        lengths,
        found,
        predicted,
        matches,
        cached if made is None else made,
        parts,
        token_pool.stride(0),
        columns,
        width,
        HAS_MADE=made is not None,
        PARTS=_MOST_PARTS,
        WIDTH=triton.next_power_of_2(width),
        num_warps=1,
    )


def accept_drafts(
    token_pool: Tensor,
    rows: Tensor,
    cached: Tensor,
    lengths: Tensor,
    samples: Tensor,
    found: Tensor,
    first: Tensor,
    drawn: Tensor,
    finite: Tensor,
    num_decode: int,
    width: int,
) -> Accepted:
    """As the reference. One launch; no host sync; graph-capturable."""
    reqs = len(rows)
    tokens, usable = rows.new_empty((reqs, width)), rows.new_empty(reqs, dtype=torch_bool)
    result = Accepted(tokens, rows.new_empty(reqs), rows.new_empty(reqs), usable)
    padded_width = triton.next_power_of_2(width)
    per_program = max(_ELEMENTS // padded_width, 1)
    if reqs:
        _accept_drafts[(triton.cdiv(reqs, per_program),)](
            token_pool,
            rows,
            cached,
            lengths,
            samples,
            found,
            first,
            drawn,
            finite,
            *result,
            reqs,
            num_decode,
            token_pool.stride(0),
            token_pool.shape[1],
            width,
            REQS=per_program,
            WIDTH=padded_width,
        )
    return result
