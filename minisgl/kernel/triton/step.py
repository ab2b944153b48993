"""The kernels of minisgl.kernel.step: metadata of a step, computed on the device.

They move a few KB, so their time is the latency of a launch: about 2 us.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device

_BLOCK = 256
_REQ_FIELDS = ["rows", "start"]  # views into the packed buffer, at any alignment


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens", "num_decode_tokens", "search_steps"],
    do_not_specialize_on_alignment=[
        *_REQ_FIELDS,
        "first",
        "chunk_ids",
        "ids",
        "positions",
        "slots",
        "deltas",
        "turns",
    ],
)
def _stage_tokens(
    rows,
    start,
    first,
    chunk_ids,
    page_table,
    token_pool,
    ids,
    positions,
    slots,
    deltas,
    turns,
    num_reqs,
    num_tokens,
    num_decode_tokens,
    search_steps,
    table_stride,
    pool_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    # Binary search in [low, high) for the request of this token: the last request that begins at
    # or before the token.
    low = tl.zeros([BLOCK], tl.int32)
    high = tl.zeros([BLOCK], tl.int32) + num_reqs
    for _ in range(search_steps):
        middle = (low + high) // 2
        after = tl.load(first + middle, mask=inside, other=0) > token
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
    row = tl.load(rows + low, mask=inside, other=0).to(tl.int64)
    begin = tl.load(start + low, mask=inside, other=0)
    position = begin + token - tl.load(first + low, mask=inside, other=0)
    page = tl.load(page_table + row * table_stride + position // PAGE_SIZE, mask=inside, other=0)
    decodes = token < num_decode_tokens
    sampled = tl.load(token_pool + row * pool_stride + position, mask=inside & decodes, other=0)
    given = tl.load(
        chunk_ids + token - num_decode_tokens, mask=inside & (token >= num_decode_tokens), other=0
    )
    tl.store(ids + token, tl.where(decodes, sampled, given), mask=inside)
    tl.store(positions + token, position, mask=inside)
    if turns is not None:
        turn = position + tl.load(deltas + low, mask=inside, other=0)
        tl.store(turns + token, turn, mask=inside)
    tl.store(slots + token, page * PAGE_SIZE + position % PAGE_SIZE, mask=inside)


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=[
        *_REQ_FIELDS,
        "lengths",
        "kv_indptr",
        "kv_indices",
        "last_page_len",
    ],
)
def _kv_metadata(
    rows,
    start,
    lengths,
    page_table,
    kv_indptr,
    kv_indices,
    last_page_len,
    num_reqs,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    REQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds up the pages of all requests, so that one launch is enough.

    WINDOW: the window of the layers; 0: none.
    """
    req = tl.program_id(0)
    reqs = tl.arange(0, REQS)
    exists = reqs < num_reqs
    begins = tl.load(start + reqs, mask=exists, other=0)
    context = begins + tl.load(lengths + reqs, mask=exists, other=0)
    if WINDOW:
        first_page = tl.maximum(begins - (WINDOW - 1), 0) // PAGE_SIZE
        context -= first_page * PAGE_SIZE
    pages = (context + PAGE_SIZE - 1) // PAGE_SIZE
    begin = tl.sum(tl.where(reqs < req, pages, 0), axis=0)
    num_pages = tl.sum(tl.where(reqs == req, pages, 0), axis=0)
    if tl.program_id(1) == 0:
        tl.store(kv_indptr + req + 1, begin + num_pages)
        if req == 0:
            tl.store(kv_indptr, 0)
        tokens = tl.sum(tl.where(reqs == req, context, 0), axis=0)
        tl.store(last_page_len + req, tokens - (num_pages - 1) * PAGE_SIZE)
    source = page_table + tl.load(rows + req).to(tl.int64) * table_stride
    if WINDOW:
        source += tl.sum(tl.where(reqs == req, first_page, 0), axis=0)
    for base in range(tl.program_id(1) * BLOCK, num_pages, tl.num_programs(1) * BLOCK):
        col = base + tl.arange(0, BLOCK)
        mask = col < num_pages
        tl.store(kv_indices + begin + col, tl.load(source + col, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=[*_REQ_FIELDS, "lengths", "samples", "tokens"],
)
def _put_tokens(
    token_pool, rows, start, lengths, samples, tokens, num_reqs, pool_stride, BLOCK: tl.constexpr
):
    req = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = req < num_reqs
    mask = mask & (tl.load(samples + req, mask=mask, other=0) != 0)
    row = tl.load(rows + req, mask=mask, other=0).to(tl.int64)
    position = tl.load(start + req, mask=mask, other=0) + tl.load(lengths + req, mask=mask, other=0)
    token = tl.load(tokens + req, mask=mask, other=0)
    tl.store(token_pool + row * pool_stride + position, token, mask=mask)


@triton.jit(do_not_specialize=["num_words"], do_not_specialize_on_alignment=["target", "source"])
def _copy_words(target, source, num_words, BLOCK: tl.constexpr):
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = word < num_words
    tl.store(target + word, tl.load(source + word, mask=inside), mask=inside)


_copy_launcher = Launcher(_copy_words, current_device)


def _copy_constants() -> Constants:
    return Constants({"BLOCK": _BLOCK}, {})


def stage_tokens(
    rows: Tensor,
    start: Tensor,
    first: Tensor,
    chunk_ids: Tensor,
    num_decode_tokens: int,
    page_table: Tensor,
    token_pool: Tensor,
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
    deltas: Tensor | None = None,
    turns: Tensor | None = None,
) -> None:
    """See the reference."""
    tokens, reqs = len(ids), len(rows)
    if tokens:
        _stage_tokens[(triton.cdiv(tokens, _BLOCK),)](
            rows,
            start,
            first,
            chunk_ids,
            page_table,
            token_pool,
            ids,
            positions,
            slots,
            deltas,
            turns,
            reqs,
            tokens,
            num_decode_tokens,
            (reqs - 1).bit_length(),
            page_table.stride(0),
            token_pool.stride(0),
            PAGE_SIZE=page_size,
            BLOCK=_BLOCK,
        )


def kv_metadata(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    window: int | None = None,
) -> None:
    """See the reference. page_table must have more rows than there are requests."""
    reqs = len(rows)
    if reqs == 0:
        kv_indptr.zero_()
        return
    per_req = min(triton.cdiv(page_table.shape[1], _BLOCK), 8)
    _kv_metadata[(reqs, per_req)](
        rows,
        start,
        lengths,
        page_table,
        kv_indptr,
        kv_indices,
        last_page_len,
        reqs,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        WINDOW=window or 0,
        REQS=max(
            triton.next_power_of_2(len(page_table) - 1), 256
        ),  # the same value for every step, so that Triton compiles one variant
        BLOCK=_BLOCK,
    )


def put_tokens(
    token_pool: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    samples: Tensor,
    tokens: Tensor,
) -> None:
    """See the reference."""
    reqs = len(rows)
    if reqs:
        _put_tokens[(triton.cdiv(reqs, _BLOCK),)](
            token_pool,
            rows,
            start,
            lengths,
            samples,
            tokens,
            reqs,
            token_pool.stride(0),
            BLOCK=_BLOCK,
        )


def copy_words(target: Tensor, source: Tensor) -> None:
    """See dispatch.copy_words."""
    words = target.numel()
    if words:
        grid = (triton.cdiv(words, _BLOCK),)
        _copy_launcher(grid, (target, source), (), (words,), (), _copy_constants)
