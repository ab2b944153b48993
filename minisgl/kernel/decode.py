"""Decode attention: the new tokens of each request attend over the request's paged context.

This file has the torch reference and the scratch memory of the Triton kernel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.fp8 import read_kv
from minisgl.kernel.rotary import qk_norm_rope_store

# A thread of the decode kernel uses 255 registers, so eight warps fill a multiprocessor.
_WARPS_PER_MULTIPROCESSOR = 8
_WIDE_HEAD = 512  # elements of a head from which one program fills a multiprocessor
_WIDE_ROWS = 16  # the most queries of a tile of such heads, unless one token has more


class DecodeScratch(NamedTuple):
    """Device memory of the decode attention kernel, for up to N requests and G programs.

    G programs of fewest_warps warps run at the same time. Programs with more warps are fewer. A
    tile has the queries of tile_tokens tokens and one KV head: R of them.
    All layers of a step with the same window share one scratch. Two calls that may run at the same
    time need two.

    first            int32 [N + 1]: the exclusive sum of the requests' blocks, from count_blocks
                     (triton/decode_blocks.py).
    partial_outputs  float32 [2 G, R, D]: outputs over parts of contexts, before they are
                     divided by the sum of their weights. A program leaves at most two parts.
    softmax_stats    float32 [2 G, 2, R]: the largest score of each part, and the sum of
                     its weights.
    semaphores       int32 [N * Hkv * tiles]: blocks of each request, KV head and tile of queries
                     that are done; zeros between calls.
    tokens           int32 [N + 1]: the exclusive sum of the requests' new tokens, from
                     count_blocks; used if requests may have several.
    """

    first: Tensor
    partial_outputs: Tensor
    softmax_stats: Tensor
    semaphores: Tensor
    tokens: Tensor


def fewest_warps(head_dim: int) -> int:
    """Return the smallest number of warps of a program of the Triton kernel.

    Each warp holds all queries of a KV head, and a part of their outputs. The kernel pads the
    queries to 16 or more, or to 8 or more in an FP8 pool. 16 queries of 512 elements take 128
    registers of each thread. The outputs then take 64 registers in a program of four warps, and the
    hot loop spills. In a program of eight warps they take 32.
    """
    return _WARPS_PER_MULTIPROCESSOR if head_dim >= _WIDE_HEAD else 1


def tile_tokens(group: int, head_dim: int, queries: int) -> int:
    """Return the number of new tokens of a request whose queries one tile of the kernel holds.

    It divides `queries`, a power of two: the most new tokens of a request. group: query heads per
    KV head. More than 16 queries of 512 elements do not fit into the registers of a warp.
    """
    if fewest_warps(head_dim) == 1:
        return queries
    fitting = max(_WIDE_ROWS // group, 1)
    return min(1 << (fitting.bit_length() - 1), queries)


def decode_scratch(
    reqs: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device, queries: int = 1
) -> DecodeScratch:
    """Scratch for up to `reqs` requests with these numbers of heads per rank.

    queries: the most new tokens of a request. A call with fewer can use the scratch as well.
    A device that is not a GPU counts as one multiprocessor.
    """
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    group = q_heads // kv_heads
    tokens = tile_tokens(group, head_dim, queries)
    rows, tiles = group * tokens, queries // tokens
    programs = multiprocessors * (_WARPS_PER_MULTIPROCESSOR // fewest_warps(head_dim))
    return DecodeScratch(
        first=torch.zeros(reqs + 1, dtype=torch.int32, device=device),
        partial_outputs=torch.zeros((2 * programs, rows, head_dim), device=device),
        softmax_stats=torch.zeros((2 * programs, 2, rows), device=device),
        semaphores=torch.zeros(reqs * kv_heads * tiles, dtype=torch.int32, device=device),
        tokens=torch.zeros(reqs + 1, dtype=torch.int32, device=device),
    )


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
    scales: Tensor | None = None,
    queries: int = 1,
    sinks: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    deltas: Tensor | None = None,
) -> None:
    """Store the new keys and values in the pool, and attend over the whole contexts.

    The context of a request has start + lengths tokens. The last `lengths` of them are new. Each
    new token attends to the tokens up to itself. (A NaN among the new keys and values may also
    reach the tokens before it in the same request.)

    qkv, q_weight, k_weight, eps, cos_sin, k_pool, v_pool, scales: as in rotary.qk_norm_rope_store.
    The T tokens are those of the requests, one request after another. The page size is a power of
    two.
    out: [T, Hq, D] of qkv's dtype, overwritten. Tokens after those of the real requests get zeros.
    page_table: int32 [rows, pages]. Its last row belongs to padded requests, which come after all
    others and store nothing.
    rows, start, lengths: int32 [N].
    scratch: used by the Triton kernel alone; see count_blocks.
    queries: the largest possible number of new tokens of a request. T is N if it is 1.
    sinks: [Hq] of qkv's dtype; each head's logit without a value, or None. window: the number of
    tokens to which a token attends, with itself; None: all up to itself. No key before the window
    of a request's first new token is read. soft_cap: each score s becomes
    soft_cap * tanh(s / soft_cap); None: no cap. deltas: int32 [N], added to the positions of
    the new tokens of a request where they select a row of cos_sin; None: 0.

    With cos_sin=None the pool holds the new keys and values already, and qkv is the normalised and
    rotated queries, [N, Hq D].
    """
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    out.zero_()
    real = rows != len(page_table) - 1
    counts = lengths[real]
    rows, position = rows[real].repeat_interleave(counts).long(), start[real] + counts
    each = torch.arange(len(rows), device=rows.device)
    position = (position - counts.cumsum(0)).repeat_interleave(counts) + each
    slots = page_table[rows, position // page_size] * page_size + position % page_size
    pools = k_pool, v_pool
    if cos_sin is None:
        q = qkv[: len(rows)].view(-1, *out.shape[1:])
    else:
        turns = position
        if deltas is not None:
            turns = position + deltas[real].repeat_interleave(counts)
        places, sizes = (cos_sin, turns, slots), (out.shape[1], kv_heads, head_dim)
        norms = q_weight, k_weight, eps
        q = qk_norm_rope_store(qkv[: len(rows)], *norms, *places, *pools, *sizes, scales)
    for index, row, last, query in zip(each, rows, position, q, strict=True):
        first = 0 if window is None else max(0, int(last) + 1 - window)
        keys_at = torch.arange(first, int(last) + 1, device=q.device)
        pages = page_table[row, keys_at // page_size]
        at = (pages * page_size + keys_at % page_size).long()
        keys, values = read_kv(*pools, at, scales, torch.float32)
        group = out.shape[1] // kv_heads
        keys, values = (heads.repeat_interleave(group, 1) for heads in (keys, values))
        scores = torch.einsum("hd,thd->ht", query.float(), keys) * head_dim**-0.5
        if soft_cap is not None:
            scores = soft_cap * (scores / soft_cap).tanh()
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().unsqueeze(1)), 1)
        weights = scores.softmax(-1)[:, : len(keys)]
        out[index] = torch.einsum("ht,thd->hd", weights, values).to(out.dtype)
