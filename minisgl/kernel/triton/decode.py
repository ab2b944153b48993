"""Decode attention over paged KV in which all programs take the same number of keys.

The work is a row of blocks: for each req and KV head, its context in blocks of BLOCK keys. Program
g of G takes the blocks from g * total / G on, whatever they belong to (the idea of stream-K, Osama
et al., 2023, as in Lean Attention, Sanovar et al., 2024). Where a context is shared by several
programs each leaves an unnormalised part, and the last to come merges them. Which blocks go
together follows from the contexts alone, so results do not change between runs; nothing is planned
on the host.

Keys are the tall operand of the matrix unit and the queries of one KV head the narrow one: scores
are [BLOCK, H] and the output [D, H]. Bytes: 4 D for each key, head and layer in 16-bit types.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.decode import DecodeScratch
from minisgl.kernel.triton.overlap import overlaps

_BLOCK = 64  # keys; 72 KB of shared memory with the stages below, three programs at a time
_STAGES = 3
_WARPS = 4
_LEAST = 2  # blocks of a program
_LOG2E = 1.4426950408889634


@triton.jit(
    do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["start", "lengths", "first"]
)
def _count_blocks(start, lengths, first, num_reqs, BLOCK: tl.constexpr, REQS: tl.constexpr):
    req = tl.arange(0, REQS)
    exists = req < num_reqs
    context = tl.load(start + req, mask=exists, other=0)
    context += tl.load(lengths + req, mask=exists, other=0)
    tl.store(first + 1 + req, tl.cumsum((context + BLOCK - 1) // BLOCK, 0), mask=exists)
    tl.store(first, 0)


@triton.jit(
    do_not_specialize=["num_reqs"], do_not_specialize_on_alignment=["rows", "start", "lengths"]
)
def _decode(
    q,
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
    scale,
    num_reqs,
    table_stride,
    slot_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    REQS: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    each = tl.arange(0, REQS)
    ends = tl.load(first + 1 + each, mask=each < num_reqs, other=2147483647)
    total = tl.load(first + num_reqs).to(tl.int64) * KV_HEADS
    programs = tl.minimum(tl.num_programs(0), tl.cdiv(total, LEAST))
    me = tl.program_id(0).to(tl.int64)
    mine = tl.minimum(me * total // programs, total)
    end = tl.minimum((me + 1) * total // programs, total)
    at = mine
    h = tl.arange(0, H)
    d = tl.arange(0, D)
    in_group = h < GROUP
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    while at < end:
        req = tl.sum((ends <= at // KV_HEADS).to(tl.int32), axis=0)
        before = tl.load(first + req).to(tl.int64) * KV_HEADS
        blocks = tl.load(first + req + 1).to(tl.int64) - before // KV_HEADS
        head = (at - before) // blocks
        unit = before + head * blocks
        b0 = (at - unit).to(tl.int32)
        b1 = tl.minimum(blocks, end - unit).to(tl.int32)
        context = tl.load(start + req) + tl.load(lengths + req)
        source = page_table + tl.load(rows + req).to(tl.int64) * table_stride
        pair = (req * KV_HEADS + head) * (GROUP * D)
        query_at = q + pair + h[None, :] * D + d[:, None]
        query = tl.load(query_at, mask=in_group[None, :], other=0.0)
        acc = tl.zeros([D, H], tl.float32)
        norm = tl.zeros([BLOCK, H], tl.float32)
        top = tl.full([H], float("-inf"), tl.float32)
        for b in tl.range(b0, b1, num_stages=STAGES):
            token = b * BLOCK + tl.arange(0, BLOCK)
            valid = token < context
            page = tl.load(source + token // PAGE, mask=valid, other=0)
            slot = page.to(tl.int64) * PAGE + token % PAGE
            key_at = (slot * slot_stride)[:, None] + (head * D + d)[None, :]
            k = tl.load(k_pool + key_at, mask=valid[:, None], other=0.0)
            score = tl.where(valid[:, None], tl.dot(k, query) * scale, float("-inf"))
            peak = tl.maximum(top, tl.max(score, axis=0))
            p = tl.exp2(score - peak[None, :])
            shrink = tl.exp2(top - peak)
            norm = norm * shrink[None, :] + p
            v = tl.load(v_pool + key_at, mask=valid[:, None], other=0.0)
            acc = tl.dot(tl.trans(v), p.to(v.dtype), acc * shrink[None, :])
            top = peak
        weight = tl.sum(norm, axis=0)
        out_at = out + pair + h[None, :] * D + d[:, None]
        if b1 - b0 == blocks:
            value = (acc / weight[None, :]).to(out.dtype.element_ty)
            tl.store(out_at, value, mask=in_group[None, :])
        else:
            slot = me * 2 + (mine != at).to(tl.int64)
            part_at = parts + slot * (H * D) + h[None, :] * D + d[:, None]
            tl.store(part_at, acc, mask=in_group[None, :])
            tl.store(stats + slot * (2 * H) + h, top)
            tl.store(stats + slot * (2 * H) + H + h, weight)
            tl.debug_barrier()
            counter = arrived + req * KV_HEADS + head
            done = tl.atomic_add(counter, b1 - b0, sem="acq_rel", scope="gpu") + b1 - b0
            if done == blocks:
                tl.store(counter, 0)
                g0 = ((unit + 1) * programs - 1) // total  # the programs that hold parts
                g1 = ((unit + blocks) * programs - 1) // total
                top = tl.full([H], float("-inf"), tl.float32)
                weight = tl.zeros([H], tl.float32)
                for some in range(g0, g1 + 1, 32):
                    g = some + tl.arange(0, 32)
                    slots = g * 2 + (g * total // programs < unit).to(tl.int64)
                    stat_at = stats + slots[:, None] * (2 * H) + h[None, :]
                    there = (g <= g1)[:, None]
                    tops = tl.load(stat_at, mask=there, other=float("-inf"), cache_modifier=".cg")
                    weights = tl.load(stat_at + H, mask=there, other=0.0, cache_modifier=".cg")
                    peak = tl.maximum(top, tl.max(tops, axis=0))
                    weights = weights * tl.exp2(tops - peak[None, :])
                    weight = weight * tl.exp2(top - peak) + tl.sum(weights, axis=0)
                    top = peak
                mask = in_group[:, None]
                merged = tl.zeros([H, D], tl.float32)
                for other in tl.range(g0, g1 + 1, num_stages=STAGES):
                    held = other * 2 + (other * total // programs < unit).to(tl.int64)
                    seen = tl.load(stats + held * (2 * H) + h, cache_modifier=".cg")
                    held_at = parts + held * (H * D) + h[:, None] * D + d[None, :]
                    part = tl.load(held_at, mask=mask, other=0.0, cache_modifier=".cg")
                    merged += part * tl.exp2(seen - top)[:, None]
                merged = merged / weight[:, None]
                merged_at = out + pair + h[:, None] * D + d[None, :]
                tl.store(merged_at, merged.to(out.dtype.element_ty), mask=mask)
        at += b1 - b0


def count_blocks(start: Tensor, lengths: Tensor, scratch: DecodeScratch) -> None:
    """Fill scratch.first for reqs of start + lengths tokens (int32 [N]): once for all layers."""
    reqs = len(start)
    padded = max(triton.next_power_of_2(reqs), 256)
    _count_blocks[(1,)](start, lengths, scratch.first, reqs, BLOCK=_BLOCK, REQS=padded)


def decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    page_table: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    scratch: DecodeScratch,
) -> None:
    """As the reference, in bfloat16 or float16.

    count_blocks ran before, and a kernel between that waits for its end (I3 of overlap). No host
    sync; graph-capturable; the same result in every run.
    """
    reqs, q_heads, head_dim = q.shape
    page_size, kv_heads = k_pool.shape[1:3]
    overlap = overlaps()
    _decode[(len(scratch.parts) // 2,)](
        q,
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
        head_dim**-0.5 * _LOG2E,
        reqs,
        page_table.stride(0),
        k_pool.stride(1),
        KV_HEADS=kv_heads,
        GROUP=q_heads // kv_heads,
        D=head_dim,
        PAGE=page_size,
        H=scratch.parts.shape[1],
        BLOCK=_BLOCK,
        REQS=max(triton.next_power_of_2(reqs), 256),
        LEAST=_LEAST,
        STAGES=_STAGES,
        OVERLAP=overlap,
        num_warps=_WARPS,
        launch_pdl=overlap,
    )
