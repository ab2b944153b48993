"""Decode attention over paged KV in which all programs do the same amount of work.

The work is a row of units, one for each req and KV head: a lead, which stands for the time that a
unit takes to start and to end, and its context in blocks of BLOCK keys. Program g of G takes what
lies from g * total / G on, whatever it belongs to (the idea of stream-K, Osama et al., 2023, as in
Lean Attention, Sanovar et al., 2024). Where a context is shared by several programs each leaves an
unnormalised part, and the last to come merges them. Which blocks go together follows from the
contexts and the number of programs, so results do not change between runs on one kind of GPU;
nothing is planned on the host.

A program norms and rotates the queries it needs. The one with the last block of a context does so
with the new key too, and puts it and the new value into the pool before it reads that block; nobody
else reads them.

A program is one warp, and eight of them share a multiprocessor: none waits for another, and while
one begins or ends a unit the others read. Large heads or groups do not fit into one warp's
registers; and with few units two or four warps end one sooner.
The rows of the matrix unit's tall operand, 16 or more, are the queries of a KV head, each several
times over where they are few, with the new key and value behind them, which are dropped: scores
are [H, BLOCK] and the output [H, D]. Bytes: 4 D for each key, head and layer in 16-bit types.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.decode import DecodeScratch
from minisgl.kernel.triton.overlap import overlaps
from minisgl.kernel.triton.rotary import scaled

_BLOCK = 16  # keys: what one instruction of the matrix unit sums over
_STAGES = 5  # 16 KB of shared memory at head_dim 128
_LEAD = 7  # blocks that take as long as a unit's start and end (docs/measurements.md)
_LEAST = 4  # blocks of a program
_FEW_UNITS = 256  # of a step in which a program is to end early, rather than leave room to others
_SMALL_GROUP = 4  # query heads of a KV head: with more a program's beginning and end are long
_MOST_ELEMENTS = 2048  # of the queries' tile, and of the output's, for one warp
_LOG2E = 1.4426950408889634
_REQ_FIELDS = ["rows", "start", "lengths", "first"]  # of any alignment


@triton.jit(do_not_specialize=["num_reqs", "dummy_row"], do_not_specialize_on_alignment=_REQ_FIELDS)
def _count_blocks(
    rows,
    start,
    lengths,
    first,
    num_reqs,
    dummy_row,
    BLOCK: tl.constexpr,
    LEAD: tl.constexpr,
    REQS: tl.constexpr,
):
    req = tl.arange(0, REQS)
    exists = req < num_reqs
    context = tl.load(start + req, mask=exists, other=0)
    context += tl.load(lengths + req, mask=exists, other=0)
    real = tl.load(rows + req, mask=exists, other=dummy_row) != dummy_row
    blocks = tl.where(real, (context + BLOCK - 1) // BLOCK + LEAD, 0)
    tl.store(first + 1 + req, tl.cumsum(blocks, 0), mask=exists)
    tl.store(first, 0)


@triton.jit
def _queries(
    row,
    head,
    new,
    q_weight,
    k_weight,
    cos_sin,
    k_at,
    v_at,
    stores,
    eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    QROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Normed and rotated [QROWS, D]: queries of a KV head, its new key, and nothing of meaning.

    row: of qkv; new: its position. Where `stores`, the new key and value go to k_at and v_at.
    Without TURN a row holds queries alone, for which all that has been done.
    """
    h = tl.arange(0, QROWS)[:, None]
    d = tl.arange(0, D)[None, :]
    half = d % (D // 2)
    opposite = (d + D // 2) % D
    if not TURN:
        if OVERLAP:
            gdc_wait()
        return tl.load(row + (head * GROUP + h) * D + d, mask=h < GROUP, other=0.0)
    cos = tl.load(cos_sin + new * D + half)
    sin = tl.load(cos_sin + new * D + D // 2 + half)
    sin = tl.where(d < D // 2, -sin, sin)
    column = row + tl.where(h < GROUP, head * GROUP + h, h * KV_HEADS + head) * D
    if OVERLAP:
        gdc_wait()
    x = tl.load(column + d, mask=h < GROUP + 2, other=0.0)
    y = tl.load(column + opposite, mask=h < GROUP + 2, other=0.0)
    turned = x
    if NORM:
        squares = x.to(tl.float32) * x.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(squares, axis=1) / D + eps)[:, None]
        of_k = tl.load(k_weight + d)
        turned = scaled(x, rstd, tl.where(h < GROUP, tl.load(q_weight + d), of_k))
        of_k = tl.load(k_weight + opposite)
        y = scaled(y, rstd, tl.where(h < GROUP, tl.load(q_weight + opposite), of_k))
    turned = (turned.to(tl.float32) * cos + y.to(tl.float32) * sin).to(x.dtype)
    nothing = tl.zeros([QROWS, D], tl.int32)
    tl.store(k_at + d + nothing, turned, mask=(h == GROUP) & stores)
    tl.store(v_at + d + nothing, x, mask=(h == GROUP + 1) & stores)
    tl.debug_barrier()
    return turned


@triton.jit
def _merged(
    parts,
    stats,
    g0,
    g1,
    unit,
    total,
    programs,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The output [ROWS, D] of a context whose parts the programs g0..g1 left."""
    h = tl.arange(0, ROWS)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    for some in range(g0, g1 + 1, 32):
        g = some + tl.arange(0, 32)
        slots = g * 2 + (g * total // programs < unit).to(tl.int32)
        stat_at = stats + slots[:, None] * (2 * GROUP) + h[None, :]
        there = (g <= g1)[:, None] & (h < GROUP)[None, :]
        tops = tl.load(stat_at, mask=there, other=float("-inf"), cache_modifier=".cg")
        weights = tl.load(stat_at + GROUP, mask=there, other=0.0, cache_modifier=".cg")
        peak = tl.maximum(top, tl.max(tops, axis=0))
        weights = weights * tl.exp2(tops - peak[None, :])
        weight = weight * tl.exp2(top - peak) + tl.sum(weights, axis=0)
        top = peak
    merged = tl.zeros([ROWS, D], tl.float32)
    inside = (h < GROUP)[:, None]
    for g in tl.range(g0, g1 + 1, num_stages=STAGES):
        slot = g * 2 + (g * total // programs < unit).to(tl.int32)
        seen = tl.load(stats + slot * (2 * GROUP) + h, mask=h < GROUP, cache_modifier=".cg")
        part_at = parts + slot * (GROUP * D) + h[:, None] * D + tl.arange(0, D)[None, :]
        part = tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
        merged += part * tl.exp2(seen - top)[:, None]
    return merged / weight[:, None]


@triton.jit(do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=_REQ_FIELDS)
def _decode(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    k_pool,
    v_pool,
    out,
    page_table,
    rows,
    start,
    lengths,
    first,
    parts,
    stats,
    arrived,
    eps,
    scale,
    num_reqs,
    qkv_stride,
    table_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    TURN: tl.constexpr,
    NORM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    REQS: tl.constexpr,
    LEAD: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    ROWS: tl.constexpr = triton.next_power_of_2(GROUP)
    QROWS: tl.constexpr = triton.next_power_of_2(GROUP + 2)
    H: tl.constexpr = QROWS if QROWS > 16 else 16  # of a tile of the matrix unit
    EACH: tl.constexpr = H // QROWS  # rows of a query
    each = tl.arange(0, REQS)
    ends = tl.load(first + 1 + each, mask=each < num_reqs, other=2147483647)
    last_end = tl.load(first + num_reqs)
    total = last_end.to(tl.int64) * KV_HEADS
    programs = tl.maximum(tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST)), 1)
    me = tl.program_id(0)
    mine = tl.minimum(me * total // programs, total).to(tl.int32)
    end = tl.minimum((me + 1) * total // programs, total).to(tl.int32)
    at = mine
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    in_group = (h < GROUP * EACH) & (h % EACH == 0)
    if OVERLAP:
        gdc_launch_dependents()
    while at < end:
        req = tl.sum((ends <= at // KV_HEADS).to(tl.int32), axis=0)
        before = tl.load(first + req) * KV_HEADS
        span = tl.load(first + req + 1) - before // KV_HEADS
        head = (at - before) // span
        unit = before + head * span
        stop = tl.minimum(unit + span, end)
        blocks = span - LEAD
        b0 = tl.maximum(at - unit - LEAD, 0)
        b1 = stop - unit - LEAD
        if b0 < b1:
            context = tl.load(start + req) + tl.load(lengths + req)
            source = page_table + tl.load(rows + req).to(tl.int64) * table_stride
            new = (context - 1).to(tl.int64)
            row = qkv + req.to(tl.int64) * qkv_stride
            new_slot = tl.load(source + new // PAGE).to(tl.int64) * PAGE + new % PAGE
            new_at = new_slot * slot_stride + head * D
            query = _queries(
                row,
                head,
                new,
                q_weight,
                k_weight,
                cos_sin,
                k_pool + new_at,
                v_pool + new_at,
                b1 == blocks,
                eps,
                KV_HEADS,
                GROUP,
                D,
                TURN,
                NORM,
                QROWS,
                OVERLAP,
            )
            query = tl.reshape(tl.broadcast_to(query[:, None, :], [QROWS, EACH, D]), [H, D])
            acc = tl.zeros([H, D], tl.float32)
            norm = tl.zeros([H, BLOCK], tl.float32)
            top = tl.full([H], float("-inf"), tl.float32)
            for b in tl.range(b0, b1, num_stages=STAGES):
                token = b * BLOCK + tl.arange(0, BLOCK)
                valid = token < context
                if PAGE % BLOCK == 0:
                    page = tl.load(source + (b * BLOCK + tl.arange(0, 1)) // PAGE)
                else:
                    page = tl.load(source + token // PAGE, mask=valid, other=0)
                page_at = page.to(tl.int64) * (slot_stride * PAGE)
                in_page = (token % PAGE * slot_stride)[:, None] + (head * D + d)[None, :]
                key_at = page_at[:, None] + in_page
                k = tl.load(k_pool + key_at, mask=valid[:, None], other=0.0)
                score = tl.dot(query, tl.trans(k)) * scale
                score = tl.where(valid[None, :], score, float("-inf"))
                peak = tl.maximum(top, tl.max(score, axis=1))
                p = tl.exp2(score - peak[:, None])
                shrink = tl.exp2(top - peak)
                norm = norm * shrink[:, None] + p
                v = tl.load(v_pool + key_at, mask=valid[:, None], other=0.0)
                acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
                top = peak
            weight = tl.sum(norm, axis=1)
            pair = (req * KV_HEADS + head) * (GROUP * D)
            row_at = h[:, None] // EACH * D + d[None, :]
            if b1 - b0 == blocks:
                value = (acc / weight[:, None]).to(out.dtype.element_ty)
                tl.store(out + pair + row_at, value, mask=in_group[:, None])
            else:
                slot = me * 2 + (mine != at).to(tl.int32)
                tl.store(parts + slot * (GROUP * D) + row_at, acc, mask=in_group[:, None])
                stat_at = stats + slot * (2 * GROUP) + h // EACH
                tl.store(stat_at, top, mask=in_group)
                tl.store(stat_at + GROUP, weight, mask=in_group)
                tl.debug_barrier()
                counter = arrived + req * KV_HEADS + head
                done = tl.atomic_add(counter, b1 - b0, sem="acq_rel", scope="gpu") + b1 - b0
                if done == blocks:
                    tl.store(counter, 0)
                    g0 = (((unit + LEAD + 1) * programs - 1) // total).to(tl.int32)
                    g1 = (((unit + span) * programs - 1) // total).to(tl.int32)
                    of_unit = (parts, stats, g0, g1, unit, total, programs)
                    value = _merged(*of_unit, GROUP, D, ROWS, STAGES).to(out.dtype.element_ty)
                    r = tl.arange(0, ROWS)[:, None]
                    tl.store(out + pair + r * D + d[None, :], value, mask=r < GROUP)
        at = stop
    if OVERLAP:
        gdc_wait()
    real = tl.sum((ends < last_end).to(tl.int32), axis=0) + (last_end > 0).to(tl.int32)
    for padded in range(real + tl.program_id(0), num_reqs, tl.num_programs(0)):
        for head in range(KV_HEADS):
            padded_at = out + (padded * KV_HEADS + head) * (GROUP * D)
            r = tl.arange(0, ROWS)[:, None]
            zeros = tl.zeros([ROWS, D], out.dtype.element_ty)
            tl.store(padded_at + r * D + d[None, :], zeros, mask=r < GROUP)


def count_blocks(
    rows: Tensor, start: Tensor, lengths: Tensor, dummy_row: int, scratch: DecodeScratch
) -> None:
    """Fill scratch.first for reqs of start + lengths tokens (int32 [N]): once for all layers."""
    counts = (rows, start, lengths, scratch.first, len(rows), dummy_row)
    _count_blocks[(1,)](*counts, BLOCK=_BLOCK, LEAD=_LEAD, REQS=_most_reqs(scratch))


def _most_reqs(scratch: DecodeScratch) -> int:
    """Of any call with it, so that the number of reqs in a step compiles nothing."""
    return max(int(triton.next_power_of_2(len(scratch.first) - 1)), 256)


def _warps(reqs: int, kv_heads: int, group: int, head_dim: int, fused: bool) -> int:
    """Of a program. fused: in a step that norms and rotates here, not beside prompts."""
    if fused and reqs * kv_heads <= _FEW_UNITS:
        return 4 if reqs == 1 and group > _SMALL_GROUP else 2
    return 1 if max(triton.next_power_of_2(group + 2), 16) * head_dim <= _MOST_ELEMENTS else 2


def decode(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    page_table: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    scratch: DecodeScratch,
) -> None:
    """As the reference, in bfloat16 or float16; qkv's rows may be strided.

    count_blocks ran before, and behind it a kernel launched in full (I3 of overlap). Padded reqs
    stand behind all others. No host sync; graph-capturable; the same result in every run.
    """
    reqs, q_heads, head_dim = out.shape
    page_size, kv_heads = k_pool.shape[1:3]
    normed = q_weight is not None and k_weight is not None
    group, overlap = q_heads // kv_heads, overlaps()
    warps = _warps(reqs, kv_heads, group, head_dim, fused=cos_sin is not None)
    _decode[(len(scratch.parts) // (2 * warps),)](
        qkv,
        q_weight if normed else qkv,
        k_weight if normed else qkv,
        qkv if cos_sin is None else cos_sin,
        k_pool,
        v_pool,
        out,
        page_table,
        rows,
        start,
        lengths,
        scratch.first,
        scratch.parts,
        scratch.stats,
        scratch.arrived,
        eps,
        head_dim**-0.5 * _LOG2E,
        reqs,
        qkv.stride(0),
        page_table.stride(0),
        k_pool.stride(1),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        TURN=cos_sin is not None,
        NORM=normed,
        PAGE=page_size,
        BLOCK=_BLOCK,
        REQS=_most_reqs(scratch),
        LEAD=_LEAD,
        LEAST=_LEAST,
        STAGES=_STAGES,
        OVERLAP=overlap,
        num_warps=warps,
        launch_pdl=overlap,
    )
