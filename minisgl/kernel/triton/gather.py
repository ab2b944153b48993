"""Contexts copied out of their pages: slots are computed once per step, and each layer copies."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.gather import TILE

_BLOCK = 256
_PROGRAMS = 512  # the most programs that compute slots
_ELEMENTS = 4096  # elements of keys, and as many of values, that a program copies at once


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["rows", "start", "lengths"],
)
def _context_slots(
    rows,
    start,
    lengths,
    page_table,
    slots,
    num_reqs,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    REQS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program adds up the contexts of all requests, so that one launch is enough.

    WINDOW: the window of the layers; 0: none.
    """
    req = tl.program_id(0)
    each = tl.arange(0, REQS)
    exists = each < num_reqs
    begins = tl.load(start + each, mask=exists, other=0)
    context = begins + tl.load(lengths + each, mask=exists, other=0)
    if WINDOW:
        first_page = tl.maximum(begins - (WINDOW - 1), 0) // PAGE_SIZE
        context -= first_page * PAGE_SIZE
    filled = (context + TILE - 1) // TILE * TILE
    begin = tl.sum(tl.where(each < req, filled, 0), axis=0)
    end = tl.sum(tl.where(each == req, filled, 0), axis=0)
    mine = tl.sum(tl.where(each == req, context, 0), axis=0)
    source = page_table + tl.load(rows + req).to(tl.int64) * table_stride
    if WINDOW:
        source += tl.sum(tl.where(each == req, first_page, 0), axis=0)
    for base in range(tl.program_id(1) * BLOCK, end, tl.num_programs(1) * BLOCK):
        token = base + tl.arange(0, BLOCK)
        inside = token < mine
        page = tl.load(source + token // PAGE_SIZE, mask=inside, other=0)
        slot = tl.where(inside, page * PAGE_SIZE + token % PAGE_SIZE, -1)
        tl.store(slots + begin + token, slot, mask=token < end)


@triton.jit
def _gather_kv(
    k_pool,
    v_pool,
    slots,
    keys,
    values,
    scales,
    ROW: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot = tl.load(slots + row)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < ROW
    source = slot.to(tl.int64) * ROW + column
    target = row[:, None].to(tl.int64) * ROW + column
    # Each element of the pool is read once, so its cache lines are evicted first. The cache then
    # keeps the copy, which the attention reads next.
    mask = (slot >= 0) & inside
    key = tl.load(k_pool + source, mask=mask, other=0.0, eviction_policy="evict_first")
    value = tl.load(v_pool + source, mask=mask, other=0.0, eviction_policy="evict_first")
    if scales is not None:
        page = (slot // PAGE).to(tl.int64) * (ROW // D)
        scale_at = scales + ((page + column // D) * PAGE + slot % PAGE) * 2
        key = key.to(tl.float32) * tl.load(scale_at, mask=mask, other=0.0).to(tl.float32)
        value = value.to(tl.float32) * tl.load(scale_at + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(keys + target, key, mask=inside)
    tl.store(values + target, value, mask=inside)


def context_slots(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    window: int | None = None,
) -> None:
    """As the reference; page_table has more rows than there are requests."""
    reqs = len(rows)
    blocks = triton.cdiv(page_table.shape[1] * page_size, _BLOCK)
    _context_slots[(reqs, max(min(blocks, _PROGRAMS // reqs), 1))](
        rows,
        start,
        lengths,
        page_table,
        slots,
        reqs,
        page_table.stride(0),
        PAGE_SIZE=page_size,
        TILE=TILE,
        WINDOW=window or 0,
        REQS=max(triton.next_power_of_2(len(page_table) - 1), 256),  # as many as a step may have
        BLOCK=_BLOCK,
    )


def gather_kv(
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None = None,
) -> None:
    """As the reference."""
    row = keys.shape[1] * keys.shape[2]
    columns = triton.next_power_of_2(row)
    rows = min(max(_ELEMENTS // columns, 1), TILE)
    _gather_kv[(len(slots) // rows,)](
        k_pool,
        v_pool,
        slots,
        keys,
        values,
        scales,
        ROW=row,
        COLUMNS=columns,
        ROWS=rows,
        D=keys.shape[2],
        PAGE=k_pool.shape[1],
    )
