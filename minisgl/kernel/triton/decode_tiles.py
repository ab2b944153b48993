"""Parts of the decode attention kernel: the queries, a block of FP8 keys, and the merge."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from minisgl.kernel.triton.fp8 import (
    exponents_of,
    magnitude,
    power_of_two,
    to_scale,
    unpacked,
    widened_keys,
)
from minisgl.kernel.triton.rotary import scaled

# The score of a key that comes after the query or before its window. It vanishes beside every other
# score. A part of a context may hold no other keys for a query. Because the score is finite, the
# sum of such a part is finite too, and its weight in the merge is zero.
HIDDEN_SCORE = tl.constexpr(-1e30)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def queries(
    row,
    head,
    new,
    q_weight,
    k_weight,
    cos_sin,
    k_at,
    v_at,
    scale_at,
    stores,
    eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    QROWS: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normalise and rotate the queries and the new key of one KV head.

    Optionally stores the new key and value. Returns [QROWS, D]: GROUP queries, the new key, and
    rows without meaning. Also returns [QROWS]: the factors of the rows.

    row       address of the request's row of qkv.
    new       position of the new token.
    scale_at  address of the scales of the new key and value; None: the pool is not FP8, and all
              factors are 1. With an FP8 pool the result is float16, and every row is divided by its
              factor, so that no query is too large for float16.
    stores    whether to store the new key at k_at and the new value at v_at.
    FEW       whether the registers of a program hold the norms' weights and the angles of all rows
              beside the queries. All operands then have one layout, and the program loads the
              weights before gdc_wait.
    TURN      False: a row of qkv holds queries alone, already normalised and rotated, and their
              keys and values are in the pool.
    """
    h = tl.arange(0, QROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    if FEW:
        d += tl.zeros([QROWS, D], tl.int32)
    half = d % (D // 2)
    opposite = (d + D // 2) % D
    if not TURN:
        if OVERLAP:
            gdc_wait()
        found = tl.load(row + (head * GROUP + h) * D + d, mask=h < GROUP, other=0.0)
        factor = tl.full([QROWS], 1.0, tl.float32)
        if scale_at is not None:
            exponents, inverse = exponents_of(tl.max(magnitude(found), axis=1))
            found = (found.to(tl.float32) * inverse[:, None]).to(tl.float16)
            factor = power_of_two(exponents)
        return found, factor
    cos = tl.load(cos_sin + new * D + half)
    sin = tl.load(cos_sin + new * D + D // 2 + half)
    sin = tl.where(d < D // 2, -sin, sin)
    column = row + tl.where(h < GROUP, head * GROUP + h, h * KV_HEADS + head) * D
    if NORM and FEW:
        weights = tl.where(h < GROUP, q_weight, k_weight)
        weight = tl.load(weights + d)
        opposite_weight = tl.load(weights + opposite)
    if OVERLAP:
        gdc_wait()
    x = tl.load(column + d, mask=h < GROUP + 2, other=0.0)
    y = tl.load(column + opposite, mask=h < GROUP + 2, other=0.0)
    turned = x
    if NORM:
        squares = x.to(tl.float32) * x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
        if not FEW:
            of_k = tl.load(k_weight + d)
            weight = tl.where(h < GROUP, tl.load(q_weight + d), of_k)
        turned = scaled(x, rstd, weight)
        if not FEW:
            of_k = tl.load(k_weight + opposite)
            opposite_weight = tl.where(h < GROUP, tl.load(q_weight + opposite), of_k)
        y = scaled(y, rstd, opposite_weight)
    turned = (turned.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)
    nothing = tl.zeros([QROWS, D], tl.int32)
    factor = tl.full([QROWS], 1.0, tl.float32)
    if scale_at is None:
        tl.store(k_at + d + nothing, turned, mask=(h == GROUP) & stores)
        tl.store(v_at + d + nothing, x, mask=(h == GROUP + 1) & stores)
    else:
        rows = tl.where(h == GROUP + 1, x, turned)
        exponents, inverse = exponents_of(tl.max(magnitude(rows), axis=1))
        small = rows.to(tl.float32) * inverse[:, None]
        if stores:
            stored = small.to(tl.float8e4nv)
            tl.store(k_at + d + nothing, stored, mask=h == GROUP)
            tl.store(v_at + d + nothing, stored, mask=h == GROUP + 1)
            each = tl.arange(0, QROWS)
            of_kv = (each == GROUP) | (each == GROUP + 1)
            tl.store(scale_at + (each - GROUP), to_scale(exponents), mask=of_kv)
        turned = small.to(tl.float16)
        factor = power_of_two(exponents)
    tl.debug_barrier()
    return turned, factor


@triton.jit
def pages_of_block(source, b, first_key, context, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """The page [BLOCK] of each key of block b, with one load for each page.

    source: address of the request's row in the page table. The request reads the keys from
    first_key to context - 1. Keys before them get the page of the first key, and keys after them
    get the page of the last key. BLOCK is a multiple of PAGE.
    """
    PAGES: tl.constexpr = BLOCK // PAGE
    nth = tl.minimum(b * PAGES + tl.arange(0, PAGES), (context - 1) // PAGE)
    page = tl.load(source + tl.maximum(nth, first_key // PAGE))
    return tl.reshape(tl.broadcast_to(page[:, None], [PAGES, PAGE]), [BLOCK])


@triton.jit
def pairs_at(vectors):
    """Convert pointers to e4m3 vectors to pointers to their first int16 pairs.

    The vectors are at multiples of 16 bytes. The caller computes the addresses in bytes, which
    takes two instructions less than in pairs.
    """
    return tl.multiple_of(vectors.to(tl.pointer_type(tl.int16)), 16)


@triton.jit
def query_halves(query, H: tl.constexpr, D: tl.constexpr, CONVERT: tl.constexpr):
    """Split the queries [H, D] into two tiles [D / 2, H], in the same way as fp8.widened_keys.

    CONVERT: as in widened_keys.
    """
    if CONVERT:
        query = tl.permute(tl.reshape(query, [H, D // 4, 2, 2]), (0, 1, 3, 2))
    first, second = tl.split(tl.reshape(query, [H, D // 2, 2]))
    return tl.trans(first), tl.trans(second)


@triton.jit
def capped(score, CAP: tl.constexpr):
    """CAP * tanh(score / CAP). Scores and CAP are in units of log2, as the argument of exp2."""
    power = tl.exp2(score * (2 * _LOG2E / CAP))
    return CAP - 2 * CAP / (power + 1)


@triton.jit
def sink_scores(sinks, row, GROUP: tl.constexpr):
    """Scores of the sinks for rows of query heads, in units of log2. sinks: those of GROUP heads.

    Row i * GROUP + g belongs to head g.
    """
    return tl.load(sinks + row % GROUP).to(tl.float32) * _LOG2E


@triton.jit
def add_fp8_block(
    acc,
    odd_acc,
    norm,
    top,
    query,
    odd_query,
    factor,
    keys,
    values,
    scales,
    inside,
    hidden,
    CAP: tl.constexpr,
    CONVERT: tl.constexpr,
):
    """Add one block of an FP8 pool to the partial output of a unit.

    Even and odd elements of values are in separate tiles, because the kernel loads pairs of
    elements as int16 (fp8.unpacked).

    acc, odd_acc      float32 [D / 2, H], norm, float32 [BLOCK, H], and top, float32 [H]: the state.
                      Returned with the block added.
    query, odd_query  float16 [D / 2, H], from query_halves. factor: float32 [H], the factor of each
                      row's scores.
    keys, values      pointers [BLOCK, D / 2] to int16 pairs. All pointers point to keys that exist.
    scales            pointers [BLOCK] to int32: the bfloat16 scales of a key and a value.
    inside            int32 [BLOCK], below 2 ** 21; positive if the key exists. The pointers of a
                      key that does not exist point to another key of the block, which exists. So
                      loads need no masks, and a weight of 0 is never multiplied by NaN.
    hidden            None or [H, BLOCK]; whether the query may not attend to the key.
    CAP               as in `capped`; None: no cap.
    """
    both = tl.load(scales)
    first, second = widened_keys(tl.load(keys), CONVERT)
    score = tl.dot(second, odd_query, tl.dot(first, query))
    score = score * factor[None, :] * (both << 16).to(tl.float32, bitcast=True)[:, None]
    if CAP is not None:
        score = capped(score, CAP)
    # A value's scale is part of its weight. With the scale in the score before the peak is taken,
    # the largest weight is 1, and the others fit into float16.
    exponent = both >> 23
    if hidden is not None:
        score = tl.where(tl.trans(hidden), HIDDEN_SCORE, score)
    # The exponents of scales are between -60 and 120. A key that does not exist gets at most -896
    # instead of its exponent. Its score is then far below that of the key that it repeats, and its
    # weight is 0.
    score += tl.minimum(exponent - 127, inside * 1024 - 896).to(tl.float32)[:, None]
    peak = tl.maximum(top, tl.max(score, axis=0))
    p = tl.exp2(score - peak[None, :])
    shrink = tl.exp2(top - peak)[None, :]
    norm = norm * shrink + p * power_of_two(254 - exponent)[:, None]
    even, odd = unpacked(tl.load(tl.trans(values)), CONVERT)
    p = p.to(tl.float16)
    return tl.dot(even, p, acc * shrink), tl.dot(odd, p, odd_acc * shrink), norm, peak


@triton.jit
def merged(
    parts,
    stats,
    g0,
    g1,
    unit,
    total,
    programs,
    sinks,
    RESULTS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The output [ROWS, D] of a unit whose partial outputs the programs g0 to g1 have stored.

    sinks: address of the sinks of the unit's GROUP heads, or None.
    """
    h = tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for some in range(g0, g1 + 1, 32):
        g = some + tl.arange(0, 32)
        slots = g * 2 + (g * total // programs < unit).to(tl.int32)
        stat_at = stats + slots[:, None] * (2 * RESULTS) + h[None, :]
        there = (g <= g1)[:, None] & (h < RESULTS)[None, :]
        tops = tl.load(stat_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stat_at + RESULTS, mask=there, other=0.0, cache_modifier=".cg")
        peak = tl.maximum(top, tl.max(tops, axis=0))
        weights = weights * tl.exp2(tops - peak[None, :])
        weight = weight * tl.exp2(top - peak) + tl.sum(weights, axis=0)
        top = peak
    if sinks is not None:
        weight += tl.exp2(sink_scores(sinks, h, GROUP) - top)
    value = tl.zeros([ROWS, D], tl.float32)
    inside = (h < RESULTS)[:, None]
    for g in tl.range(g0, g1 + 1, num_stages=STAGES):
        slot = g * 2 + (g * total // programs < unit).to(tl.int32)
        seen = tl.load(stats + slot * (2 * RESULTS) + h, mask=h < RESULTS, cache_modifier=".cg")
        part_at = parts + slot * (RESULTS * D) + h[:, None] * D + tl.arange(0, D)[None, :]
        part = tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
        value += part * tl.exp2(seen - top)[:, None]
    return value / weight[:, None]
