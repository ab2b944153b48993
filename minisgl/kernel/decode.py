"""Attention of one new token per req over its paged context."""

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.rotary import qk_norm_rope_store

_WARPS_PER_MULTIPROCESSOR = 8  # with 255 registers a thread: all there are


class DecodeScratch(NamedTuple):
    """Memory of decode attention for up to N reqs; layers share it, calls in flight must not.

    first    int32 [N + 1]; what the reqs before come to, by count_blocks.
    parts    float32 [2 G, Hq / Hkv, D] and
    stats    float32 [2 G, 2, Hq / Hkv]: two parts of contexts for each of up to G programs,
             unnormalised, and their largest scores and sums.
    arrived  int32 [N * Hkv]; zeros between calls.
    kernels  compiled, by what of a call they depend on.
    """

    first: Tensor
    parts: Tensor
    stats: Tensor
    arrived: Tensor
    kernels: dict[Hashable, Any]


def decode_scratch(
    reqs: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch for up to `reqs` reqs on a CUDA device, or on the device meta."""
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    group = q_heads // kv_heads
    programs = multiprocessors * _WARPS_PER_MULTIPROCESSOR  # of one warp; of several, fewer
    return DecodeScratch(
        first=torch.zeros(reqs + 1, dtype=torch.int32, device=device),
        parts=torch.zeros((2 * programs, group, head_dim), device=device),
        stats=torch.zeros((2 * programs, 2, group), device=device),
        arrived=torch.zeros(reqs * kv_heads, dtype=torch.int32, device=device),
        kernels={},
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
) -> None:
    """Put the new key and value into the pool, and attend over contexts of start + lengths tokens.

    qkv .. cos_sin, k_pool, v_pool: as in rotary.qk_norm_rope_store; the new token is a context's
    last. out: [N, Hq, D], overwritten; S is a power of two. page_table: int32 [rows, pages], its
    last row for padded reqs, which get zeros and put nothing; rows, start, lengths: int32 [N].
    scratch: see count_blocks. Without cos_sin the pool has the new keys and values, and qkv is q,
    [N, Hq D], normed and rotated.
    """
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    out.zero_()
    real = (rows != len(page_table) - 1).nonzero()[:, 0]
    rows, position = rows[real].long(), (start + lengths)[real].long() - 1
    slots = page_table[rows, position // page_size] * page_size + position % page_size
    pools = k_pool, v_pool
    if cos_sin is None:
        q = qkv[real].view(-1, *out.shape[1:])
    else:
        places, sizes = (cos_sin, position, slots), (out.shape[1], kv_heads, head_dim)
        norms = q_weight, k_weight, eps
        q = qk_norm_rope_store(qkv[real], *norms, *places, *pools, *sizes)
    for index, row, last, query in zip(real, rows, position, q, strict=True):
        each = torch.arange(int(last) + 1, device=q.device)
        at = (page_table[row, each // page_size] * page_size + each % page_size).long()
        keys, values = (pool.flatten(0, 1)[at].float() for pool in pools)
        group = out.shape[1] // kv_heads
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("hd,thd->ht", query.float(), keys) * head_dim**-0.5
        out[index] = torch.einsum("ht,thd->hd", scores.softmax(-1), values).to(out.dtype)
