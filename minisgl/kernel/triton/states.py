"""Layers with recurrent states: their requests in a step, and copies of states."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

_REQS = 128  # requests of a program of _begin_states
_MOST_WORDS = 4096  # of a program of _copy_states


@triton.jit(
    do_not_specialize=["reqs", "num_decode", "count", "size", "dummy_row", "columns"],
    do_not_specialize_on_alignment=["rows", "start", "lengths", "first"],
)
def _begin_states(
    boundaries, rows, start, lengths, first, out, reqs, num_decode, count, size, dummy_row, columns,
    SPAN: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    req = tl.program_id(0) * REQS + tl.arange(0, REQS)
    exists, inside = req < reqs, req < columns
    row = tl.load(rows + req, mask=exists, other=dummy_row)
    begin = tl.load(start + req, mask=exists, other=0)
    tokens = tl.load(lengths + req, mask=exists, other=0)
    tokens = tl.where(req == reqs, size - count, tokens)
    index = tl.load(first + req, mask=exists, other=0)
    index = tl.where(exists, index, tl.where(req == reqs, count, size))
    page = begin // SPAN * SPAN
    last = tl.where(req < num_decode, begin, tl.maximum(begin + tokens - 1, 0))
    target = tl.maximum(last // SPAN * SPAN, page)
    base = tl.load(boundaries + row, mask=exists, other=0)
    base = tl.minimum(tl.maximum(base, page - SPAN), page)
    tl.store(out + req, row, mask=inside)
    tl.store(out + columns + req, begin, mask=inside)
    tl.store(out + 2 * columns + req, tokens, mask=inside)
    tl.store(out + 3 * columns + req, index, mask=inside)
    tl.store(out + 4 * columns + req, base, mask=inside)
    tl.store(out + 5 * columns + req, target, mask=inside)
    tl.store(boundaries + row, target, mask=exists)


@triton.jit(do_not_specialize_on_alignment=["rows", "pages"])
def _copy_states(
    kept, rows, pages, pool, row_words, slices, slice_stride, copy_pages,
    WORDS: tl.constexpr, BLOCK: tl.constexpr, SAVE: tl.constexpr,
):  # fmt: skip
    """Copy BLOCK words, which lie in one slice of one page."""
    copy = tl.program_id(1)
    word = tl.program_id(0).to(tl.int64) * BLOCK
    part = word // WORDS
    row = tl.load(rows + copy).to(tl.int64)
    page = tl.load(pages + copy * copy_pages + part // slices).to(tl.int64)
    index = tl.arange(0, BLOCK)
    inside = word + index < row_words
    row_at = kept + row * row_words + word + index
    pool_at = pool + part % slices * slice_stride + page * WORDS + word % WORDS + index
    if SAVE:
        tl.store(pool_at, tl.load(row_at, mask=inside), mask=inside)
    else:
        tl.store(row_at, tl.load(pool_at, mask=inside), mask=inside)


def begin_states(
    boundaries: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    first: Tensor,
    num_decode: int,
    page_size: int,
    count: int,
    size: int,
    out: Tensor,
) -> None:
    """As the reference. `out` is contiguous. One launch."""
    columns = out.shape[1]
    _begin_states[(triton.cdiv(columns, _REQS),)](
        boundaries,
        rows,
        start,
        lengths,
        first,
        out,
        len(rows),
        num_decode,
        count,
        size,
        len(boundaries) - 1,
        columns,
        SPAN=page_size,
        REQS=_REQS,
    )


def copy_states(kept: Tensor, rows: Tensor, pages: Tensor, pool: Tensor, save: bool) -> None:
    """As the reference. All tensors are contiguous. One launch."""
    slices, _, words = pool.shape
    block = min(words & -words, _MOST_WORDS)  # the largest power of two that divides `words`
    _copy_states[(triton.cdiv(kept.shape[1], block), len(rows))](
        kept,
        rows,
        pages,
        pool,
        kept.shape[1],
        slices,
        pool.stride(0),
        pages.shape[1],
        WORDS=words,
        BLOCK=block,
        SAVE=save,
        num_warps=8,
    )
