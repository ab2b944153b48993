"""Queries, new keys and new values of requests with several new tokens, for the decode kernel.

A tile holds the queries of a KV head and of several new tokens: row i * GROUP + g is query head g
of the i-th token of the tile.
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
    first_query,
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
    GROUP * (length - first_query) on are zeros.

    row           address of the request's first row of qkv.
    first_query   number of the first new token of the tile.
    first_new     position of the first of `length` new tokens, at most QUERIES.
    begin, end    positions of the keys that this program reads. It stores those that are new.
    source        address of the request's row in the page table.
    TURN          as in decode_tiles.queries. If False, nothing is stored.
    """
    r = tl.arange(0, ROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    nth = first_query + r // GROUP
    exists = nth < length
    at = row + nth.to(tl.int64) * qkv_stride + (head * GROUP + r % GROUP) * D
    if TURN:
        each = tl.arange(0, triton.next_power_of_2(2 * QUERIES))  # new keys, then new values
        is_value = each >= QUERIES
        new = tl.where(is_value, each - QUERIES, each)
        position = first_new + new
        stored = (new < length) & (position >= begin) & (position < end)
        mask = stored[:, None]
        column = KV_HEADS * GROUP + tl.where(is_value, KV_HEADS, 0) + head
        new_at = (row + new.to(tl.int64) * qkv_stride + column * D)[:, None]
        # All loads come before the first use of their results, so that they run at the same time.
        cos, sin = _angles(cos_sin, first_new + nth, exists, D)
        new_cos, new_sin = _angles(cos_sin, position[:, None], mask, D)
        page = tl.load(source + position // PAGE, mask=stored, other=0).to(tl.int64)
        if OVERLAP:
            gdc_wait()
        opposite = (d + D // 2) % D
        found = tl.load(at + d, mask=exists, other=0.0)
        found_opposite = tl.load(at + opposite, mask=exists, other=0.0)
        heads = tl.load(new_at + d, mask=mask, other=0.0)
        heads_opposite = tl.load(new_at + opposite, mask=mask, other=0.0)
        found = _turned(found, found_opposite, cos, sin, q_weight, eps, D, NORM)
        keys = _turned(heads, heads_opposite, new_cos, new_sin, k_weight, eps, D, NORM)
        heads = tl.where(is_value[:, None], heads, keys)
        if scales is not None:
            exponents, inverse = exponents_of(tl.max(magnitude(heads), axis=1))
            heads = (heads.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
            scale_at = ((page * KV_HEADS + head) * PAGE + position % PAGE) * 2
            tl.store(scales + scale_at + is_value.to(tl.int32), to_scale(exponents), mask=stored)
        target = ((page * PAGE + position % PAGE) * slot_stride + head * D)[:, None] + d
        tl.store(k_pool + target, heads, mask=mask & ~is_value[:, None])
        tl.store(v_pool + target, heads, mask=mask & is_value[:, None])
        tl.debug_barrier()
    else:
        if OVERLAP:
            gdc_wait()
        found = tl.load(at + d, mask=exists, other=0.0)
    factor = tl.full([ROWS], 1.0, tl.float32)
    if scales is not None:
        exponents, inverse = exponents_of(tl.max(magnitude(found), axis=1))
        found = (found.to(tl.float32) * inverse[:, None]).to(tl.float16)
        factor = power_of_two(exponents)
    return found, factor


@triton.jit
def _angles(cos_sin, position, exists, D: tl.constexpr):
    """Cosines and sines [R, D] of the angles by which heads at `position` [R, 1] are rotated."""
    d = tl.arange(0, D)[None, :]
    at = cos_sin + position * D + d % (D // 2)
    cos = tl.load(at, mask=exists, other=0.0)
    sin = tl.load(at + D // 2, mask=exists, other=0.0)
    return cos, tl.where(d < D // 2, -sin, sin)


@triton.jit
def _turned(x, opposite, cos, sin, weight, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Normalise and rotate heads x [R, D]. opposite: the heads with their halves exchanged."""
    turned = x
    if NORM:
        d = tl.arange(0, D)[None, :]
        weights = tl.load(weight + d)
        opposite_weights = tl.load(weight + (d + D // 2) % D)
        squares = x.to(tl.float32) * x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
        turned = scaled(x, rstd, weights)
        opposite = scaled(opposite, rstd, opposite_weights)
    return (turned.to(tl.float32) * cos + opposite.to(tl.float32) * sin).to(x.dtype)
