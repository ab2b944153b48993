"""Decode attention over the paged KV pool, in which all programs do the same amount of work.

A unit of work is one request and one KV head. The length of a unit is a number of blocks. One block
is BLOCK keys of the context. In front of these blocks, each unit has LEAD blocks without keys. They
stand for the start and the end of the unit, which take a program as long as reading LEAD blocks.
For example, a context of 100 keys with BLOCK 16 and LEAD 7 has 7 + 7 = 14 blocks. `first` holds the
prefix sums of these lengths over the requests.

All units stand one after another in a line of `total` blocks. The line is cut into G equal pieces,
one for each program. Program g handles the blocks from g * total / G to (g + 1) * total / G. A
piece may contain the end of one unit and the beginning of the next. This is stream-K (Osama et al.,
2023) for attention, as in Lean Attention (Sanovar et al., 2024). The host plans nothing.

If several programs share a context, each stores an unnormalised partial output, and the last one to
finish merges them. The ends of the pieces depend only on the lengths of the contexts and on the
number of programs, so results do not change between runs on one kind of GPU.

A program normalises and rotates the queries that it needs. The program with the last block of a
context also normalises and rotates the new key, and stores it and the new value in the pool before
it reads that block. No other program reads them.

A program is one warp, and a multiprocessor runs eight programs. No program waits for another: while
one begins or ends a unit, the other seven read. There are four exceptions to one warp. If large
heads or groups do not fit into the registers of one warp, a program has two. With heads of 512
elements it has eight. If there are few units (decode_blocks.py), a program has two or four, so that
each unit ends sooner. With an FP8 pool such a program loads the weights and the angles while the
kernel before it still runs. If requests may have several new tokens, a program has two to eight.

One operand of the matrix unit has H rows. It holds the queries of a KV head, then the new key and
the new value. Each of them is repeated to fill H rows. The kernel drops the results of the new key,
of the new value and of the repetitions. Scores are [H, BLOCK], the output is [H, D], and H is at
least 16. With an FP8 pool the operands change places: scores are [BLOCK, H], the output is [D, H],
and H is at least 8. This halves the work of the matrix unit, and the arithmetic on scores and
outputs. Bytes read in 16-bit types: 4 D per key, KV head and layer.

A request may have several new tokens: its last token and drafts. The operand then holds the queries
of up to QUERIES tokens (decode_several.py). Several tokens take no more instructions than one token
if their queries fit into the smallest H. Each query has its own last visible key. A program stores
the new keys of its own blocks. With heads of 512 elements, H is 16, and the operand holds the
queries of TILE tokens. The other tokens are in further units, which read the same keys. The
programs of several units may then store the same key, with the same bits.

In a layer with a window of W tokens, the first key of a request is the first one to which its
first new token attends: key max(0, start + 1 - W). A unit begins at the block of this key. No
program reads a page before the page of this key, because such a page may belong to another request.
The sink of a head is one more score, without a value. The program that completes a unit adds its
weight to the sum.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton.decode_blocks import REQ_FIELDS
from minisgl.kernel.triton.decode_several import several_queries
from minisgl.kernel.triton.decode_tiles import (
    HIDDEN_SCORE,
    add_fp8_block,
    capped,
    merged,
    pages_of_block,
    pairs_at,
    queries,
    query_halves,
    sink_scores,
)


@triton.jit(
    do_not_specialize=["num_reqs", "num_tokens"],
    do_not_specialize_on_alignment=[*REQ_FIELDS, "deltas"],
)
def decode_kernel(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    k_pool,
    v_pool,
    scales,
    sinks,
    out,
    page_table,
    rows,
    start,
    lengths,
    first,
    parts,
    stats,
    semaphores,
    tokens,
    deltas,
    qkv_stride,
    table_stride,
    eps,
    scale,
    num_reqs,
    num_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    D: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    WINDOW: tl.constexpr,
    CAP: tl.constexpr,
    PAGE: tl.constexpr,
    SLOT: tl.constexpr,
    BLOCK: tl.constexpr,
    REQS: tl.constexpr,
    LEAD: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    FEW: tl.constexpr,
    OVERLAP: tl.constexpr,
    CONVERT: tl.constexpr,
):
    RESULTS: tl.constexpr = GROUP * TILE
    TILES: tl.constexpr = QUERIES // TILE
    UNITS: tl.constexpr = KV_HEADS * TILES  # of a request
    ROWS: tl.constexpr = triton.next_power_of_2(RESULTS)
    QROWS: tl.constexpr = triton.next_power_of_2(GROUP + 2) if QUERIES == 1 else ROWS
    LEAST_ROWS: tl.constexpr = 16 if scales is None else 8  # of a tile of the matrix unit
    H: tl.constexpr = QROWS if QROWS > LEAST_ROWS else LEAST_ROWS
    EACH: tl.constexpr = H // QROWS  # copies of each query
    # Elements of a row of the pool: an FP8 pool is read as pairs of elements.
    WIDTH: tl.constexpr = D if scales is None else D // 2
    reqs = tl.arange(0, REQS)
    ends = tl.load(first + 1 + reqs, mask=reqs < num_reqs, other=2147483647)
    last_end = tl.load(first + num_reqs)
    total = last_end.to(tl.int64) * UNITS
    programs = tl.maximum(tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST)), 1)
    program = tl.program_id(0)
    begin = tl.minimum(program * total // programs, total).to(tl.int32)
    end = tl.minimum((program + 1) * total // programs, total).to(tl.int32)
    at = begin
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    in_group = (h < RESULTS * EACH) & (h % EACH == 0)
    if OVERLAP:
        gdc_launch_dependents()
    while at < end:
        req = tl.sum((ends <= at // UNITS).to(tl.int32), axis=0)
        before = tl.load(first + req) * UNITS
        span = tl.load(first + req + 1) - before // UNITS
        nth = (at - before) // span
        unit = before + nth * span
        head = nth // TILES
        first_query = nth % TILES * TILE
        stop = tl.minimum(unit + span, end)
        blocks = span - LEAD
        b0 = tl.maximum(at - unit - LEAD, 0)
        b1 = stop - unit - LEAD
        has_work = b0 < b1
        if TILES > 1:  # a tile after the new tokens of its request has no queries
            has_work &= first_query < tl.load(lengths + req)
        if has_work:
            context = tl.load(start + req) + tl.load(lengths + req)
            first_key, first_block = 0, 0
            if WINDOW is not None:
                first_key = tl.maximum(tl.load(start + req) + 1 - WINDOW, 0)
                first_block = first_key // BLOCK
            sink_at = sinks
            if sinks is not None:
                sink_at += head * GROUP
                sink = sink_scores(sink_at, h // EACH, GROUP)
            source = page_table + tl.load(rows + req).to(tl.int64) * table_stride
            angles = cos_sin
            if deltas is not None:
                angles += tl.load(deltas + req) * D
            if QUERIES == 1:
                new = (context - 1).to(tl.int64)
                row = qkv + req.to(tl.int64) * qkv_stride
                new_slot = tl.load(source + new // PAGE).to(tl.int64) * PAGE + new % PAGE
                new_at = new_slot * SLOT + head * D
                new_scale = scales
                if scales is not None:
                    new_scale += ((new_slot // PAGE * KV_HEADS + head) * PAGE + new_slot % PAGE) * 2
                query, factor = queries(
                    row,
                    head,
                    new,
                    q_weight,
                    k_weight,
                    angles,
                    k_pool + new_at,
                    v_pool + new_at,
                    new_scale,
                    b1 == blocks,
                    eps,
                    KV_HEADS,
                    GROUP,
                    D,
                    TURN,
                    NORM,
                    QROWS,
                    FEW,
                    OVERLAP,
                )
            else:
                first_new = tl.load(start + req)
                first_token = tl.load(tokens + req)
                last_visible = first_new + first_query + h[:, None] // (EACH * GROUP)
                k0, k1 = (first_block + b0) * BLOCK, (first_block + b1) * BLOCK
                of_request = (first_new, context - first_new, k0, k1, source)
                tensors = (q_weight, k_weight, angles, k_pool, v_pool, scales)
                query, factor = several_queries(
                    qkv + first_token.to(tl.int64) * qkv_stride,
                    head,
                    first_query,
                    *of_request,
                    *tensors,
                    eps,
                    qkv_stride,
                    SLOT,
                    KV_HEADS,
                    GROUP,
                    QUERIES,
                    D,
                    TURN,
                    NORM,
                    PAGE,
                    QROWS,
                    OVERLAP,
                )
            query = tl.reshape(tl.broadcast_to(query[:, None, :], [QROWS, EACH, D]), [H, D])
            if scales is not None:
                factor = tl.reshape(tl.broadcast_to(factor[:, None], [QROWS, EACH]), [H]) * scale
                query, odd_query = query_halves(query, H, D, CONVERT)
                acc = tl.zeros([WIDTH, H], tl.float32)
                odd_acc = tl.zeros([WIDTH, H], tl.float32)
                norm = tl.zeros([BLOCK, H], tl.float32)
            else:
                acc = tl.zeros([H, WIDTH], tl.float32)
                norm = tl.zeros([H, BLOCK], tl.float32)
            top = tl.full([H], float("-inf"), tl.float32)
            for b in tl.range(first_block + b0, first_block + b1, num_stages=STAGES):
                token = b * BLOCK + tl.arange(0, BLOCK)
                valid = token < context
                if WINDOW is not None:
                    valid &= token >= first_key
                hidden = None
                if QUERIES > 1:
                    hidden = token[None, :] > last_visible
                    if WINDOW is not None:
                        hidden |= token[None, :] <= last_visible - WINDOW
                if PAGE % BLOCK == 0:
                    page = tl.load(source + (b * BLOCK + tl.arange(0, 1)) // PAGE)
                elif scales is not None:
                    page = pages_of_block(source, b, first_key, context, BLOCK, PAGE)
                else:
                    page = tl.load(source + token // PAGE, mask=valid, other=0)
                if scales is None:
                    page_at = page.to(tl.int64) * (SLOT * PAGE)
                    in_page = (token % PAGE * SLOT)[:, None] + (head * D + d)[None, :]
                    key_at = page_at[:, None] + in_page
                    k = tl.load(k_pool + key_at, mask=valid[:, None], other=0.0)
                    score = tl.dot(query, tl.trans(k)) * scale
                    if CAP is not None:
                        score = capped(score, CAP)
                    score = tl.where(valid[None, :], score, float("-inf"))
                    if hidden is not None:
                        score = tl.where(hidden, HIDDEN_SCORE, score)
                    peak = tl.maximum(top, tl.max(score, axis=1))
                    p = tl.exp2(score - peak[:, None])
                    shrink = tl.exp2(top - peak)
                    norm = norm * shrink[:, None] + p
                    v = tl.load(v_pool + key_at, mask=valid[:, None], other=0.0)
                    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
                    top = peak
                else:
                    # The key to load. In place of a key that does not exist, it is another one.
                    read = tl.minimum(token, context - 1)
                    inside = context - token
                    if WINDOW is not None:
                        read = tl.maximum(read, first_key)
                        inside = tl.minimum(inside, token - first_key + 1)
                    read = read.to(tl.uint32) % PAGE
                    slot_at = page.to(tl.int64) * (SLOT * PAGE) + read * SLOT
                    column = tl.arange(0, WIDTH)[None, :]
                    key_at = pairs_at(k_pool + head * D + slot_at)[:, None] + column
                    value_at = pairs_at(v_pool + head * D + slot_at)[:, None] + column
                    scale_at = (page.to(tl.int64) * KV_HEADS + head) * PAGE + read
                    acc, odd_acc, norm, top = add_fp8_block(
                        acc,
                        odd_acc,
                        norm,
                        top,
                        query,
                        odd_query,
                        factor,
                        key_at,
                        value_at,
                        scales.to(tl.pointer_type(tl.int32)) + scale_at,
                        inside,
                        hidden,
                        CAP,
                        CONVERT,
                    )
            if scales is not None:
                acc = tl.reshape(tl.join(tl.trans(acc), tl.trans(odd_acc)), [H, D])
                weight = tl.sum(norm, axis=0)
            else:
                weight = tl.sum(norm, axis=1)
            results = GROUP
            if QUERIES == 1:
                pair = (req * KV_HEADS + head) * (GROUP * D)
            else:
                pair = ((first_token + first_query) * KV_HEADS + head) * (GROUP * D)
                results = tl.minimum(context - first_new - first_query, TILE) * GROUP
            row_at = h[:, None] // EACH * D + d[None, :]
            if b1 - b0 == blocks:
                if sinks is not None:
                    weight += tl.exp2(sink - top)
                value = (acc / weight[:, None]).to(out.dtype.element_ty)
                if QUERIES == 1:
                    tl.store(out + pair + row_at, value, mask=in_group[:, None])
                else:
                    spread = h[:, None] // (EACH * GROUP) * ((KV_HEADS - 1) * GROUP * D)
                    written = in_group & (h // EACH < results)
                    tl.store(out + pair + row_at + spread, value, mask=written[:, None])
            else:
                slot = program * 2 + (begin != at).to(tl.int32)
                tl.store(parts + slot * (RESULTS * D) + row_at, acc, mask=in_group[:, None])
                stat_at = stats + slot * (2 * RESULTS) + h // EACH
                tl.store(stat_at, top, mask=in_group)
                tl.store(stat_at + RESULTS, weight, mask=in_group)
                tl.debug_barrier()
                counter = semaphores + req * UNITS + nth
                done = tl.atomic_add(counter, b1 - b0, sem="acq_rel", scope="gpu") + b1 - b0
                if done == blocks:
                    tl.store(counter, 0)
                    g0 = (((unit + LEAD + 1) * programs - 1) // total).to(tl.int32)
                    g1 = (((unit + span) * programs - 1) // total).to(tl.int32)
                    of_unit = (parts, stats, g0, g1, unit, total, programs)
                    value = merged(*of_unit, sink_at, RESULTS, GROUP, D, ROWS, STAGES)
                    r = tl.arange(0, ROWS)[:, None]
                    value_at = out + pair + r * D + d[None, :]
                    if QUERIES > 1:
                        value_at += r // GROUP * ((KV_HEADS - 1) * GROUP * D)
                    tl.store(value_at, value.to(out.dtype.element_ty), mask=r < results)
        at = stop
    if OVERLAP:
        gdc_wait()
    if QUERIES == 1:
        real = tl.sum((ends < last_end).to(tl.int32), axis=0) + (last_end > 0).to(tl.int32)
        rows_out = num_reqs
    else:
        real = tl.load(tokens + num_reqs)
        rows_out = num_tokens
    for padded in range(real + tl.program_id(0), rows_out, tl.num_programs(0)):
        for head in range(KV_HEADS):
            padded_at = out + (padded * KV_HEADS + head) * (GROUP * D)
            r = tl.arange(0, ROWS)[:, None]
            zeros = tl.zeros([ROWS, D], out.dtype.element_ty)
            tl.store(padded_at + r * D + d[None, :], zeros, mask=r < GROUP)
