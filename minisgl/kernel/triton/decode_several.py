"""Queries, new keys and new values of requests with several new tokens, for the decode kernel.

The tile of a KV head holds the queries of all new tokens: row i * GROUP + g is query head g of new
token i.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from minisgl.kernel.triton.fp8 import exponents_of, magnitude, power_of_two, to_scale
from minisgl.kernel.triton.rotary import scaled


@triton.jit
def several_queries(
    row,
    head,
    first_new,
    length,
    begin,
    end,
    source,
    q_weight,
    k_weight,
    cos_sin,
    k_pool,
    v_pool,
    scales,
    eps,
    qkv_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise and rotate the queries of one KV head, and store new keys and values.

    Returns [ROWS, D] and [ROWS]: queries and factors, as decode_tiles.queries. Rows from
    GROUP * length on are zeros.

    row           address of the request's first row of qkv.
    first_new     position of the first of `length` new tokens, at most QUERIES.
    begin, end    positions of the keys that this program reads. It stores those that are new.
    source        address of the request's row in the page table.
    TURN          as in decode_tiles.queries. If False, nothing is stored.
    """
    r = tl.arange(0, ROWS)[:, None]
    nth = r // GROUP
    exists = r < GROUP * length
    if OVERLAP:
        gdc_wait()
    at = row + nth.to(tl.int64) * qkv_stride + (head * GROUP + r % GROUP) * D
    if TURN:
        _, found = turned(at, first_new + nth, exists, q_weight, cos_sin, eps, D, NORM)
        if end > first_new:
            _store_new(
                row,
                head,
                first_new,
                length,
                begin,
                end,
                source,
                k_weight,
                cos_sin,
                k_pool,
                v_pool,
                scales,
                eps,
                qkv_stride,
                slot_stride,
                KV_HEADS,
                GROUP,
                QUERIES,
                D,
                NORM,
                PAGE,
            )
        tl.debug_barrier()
    else:
        found = tl.load(at + tl.arange(0, D)[None, :], mask=exists, other=0.0)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if scales is not None:
        exponents, inverse = exponents_of(tl.max(magnitude(found), axis=1))
        found = (found.to(tl.float32) * inverse[:, None]).to(tl.float16)
        factor = power_of_two(exponents)
    return found, factor


@triton.jit
def turned(at, position, exists, weight, cos_sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Load heads, and return them [R, D], unchanged and then normalised and rotated.

    at, position, exists: [R, 1]; the address of each head, its position, and whether to load it.
    """
    d = tl.arange(0, D)[None, :]
    half = d % (D // 2)
    opposite = (d + D // 2) % D
    x = tl.load(at + d, mask=exists, other=0.0)
    y = tl.load(at + opposite, mask=exists, other=0.0)
    result = x
    if NORM:
        squares = x.to(tl.float32) * x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
        result = scaled(x, rstd, tl.load(weight + d))
        y = scaled(y, rstd, tl.load(weight + opposite))
    cos = tl.load(cos_sin + position * D + half, mask=exists, other=0.0)
    sin = tl.load(cos_sin + position * D + D // 2 + half, mask=exists, other=0.0)
    sin = tl.where(d < D // 2, -sin, sin)
    return x, (result.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)


@triton.jit
def _store_new(
    row,
    head,
    first_new,
    length,
    begin,
    end,
    source,
    k_weight,
    cos_sin,
    k_pool,
    v_pool,
    scales,
    eps,
    qkv_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Store the new keys and values at the positions begin to end - 1."""
    each = tl.arange(0, triton.next_power_of_2(2 * QUERIES))  # the keys, then the values
    is_value = each >= QUERIES
    nth = tl.where(is_value, each - QUERIES, each)
    position = first_new + nth
    stored = (nth < length) & (position >= begin) & (position < end)
    column = KV_HEADS * GROUP + tl.where(is_value, KV_HEADS, 0) + head
    at = row + nth.to(tl.int64) * qkv_stride + column * D
    place, mask = position[:, None], stored[:, None]
    plain, keys = turned(at[:, None], place, mask, k_weight, cos_sin, eps, D, NORM)
    heads = tl.where(is_value[:, None], plain, keys)
    page = tl.load(source + position // PAGE, mask=stored, other=0).to(tl.int64)
    if scales is not None:
        exponents, inverse = exponents_of(tl.max(magnitude(heads), axis=1))
        heads = (heads.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
        scale_at = ((page * KV_HEADS + head) * PAGE + position % PAGE) * 2
        tl.store(scales + scale_at + is_value.to(tl.int32), to_scale(exponents), mask=stored)
    target = (page * PAGE + position % PAGE) * slot_stride + head * D
    target = target[:, None] + tl.arange(0, D)[None, :]
    tl.store(k_pool + target, heads, mask=mask & ~is_value[:, None])
    tl.store(v_pool + target, heads, mask=mask & is_value[:, None])
