"""Attention of one new token per req over its paged context."""

from typing import NamedTuple

import torch
from torch import Tensor

_WIDEST_MMA = 16  # rows that the matrix unit takes at least
_PROGRAMS_PER_MULTIPROCESSOR = 3  # by their shared memory, up to head_dim 128


class DecodeScratch(NamedTuple):
    """Memory of decode attention for up to N reqs; layers share it, calls in flight must not.

    first    int32 [N + 1]; blocks of keys of the reqs before, by count_blocks.
    parts    float32 [2 G, H, D] and
    stats    float32 [2 G, 2, H]: two parts of contexts for each of G programs, unnormalised, and
             their largest scores and sums. H is the group of query heads, padded.
    arrived  int32 [N * Hkv]; zeros between calls.
    """

    first: Tensor
    parts: Tensor
    stats: Tensor
    arrived: Tensor


def decode_scratch(
    reqs: int, q_heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeScratch:
    """Scratch for up to `reqs` reqs on a CUDA device, or on the device meta."""
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    programs = multiprocessors * (_PROGRAMS_PER_MULTIPROCESSOR if head_dim <= 128 else 1)
    group = max(1 << (q_heads // kv_heads - 1).bit_length(), _WIDEST_MMA)
    return DecodeScratch(
        first=torch.zeros(reqs + 1, dtype=torch.int32, device=device),
        parts=torch.zeros((2 * programs, group, head_dim), device=device),
        stats=torch.zeros((2 * programs, 2, group), device=device),
        arrived=torch.zeros(reqs * kv_heads, dtype=torch.int32, device=device),
    )


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
    """Attend over whole contexts of start + lengths tokens, whose keys are all in the pool.

    q, out: [N, Hq, D], out overwritten; k_pool, v_pool: [P, S, Hkv, D], S a power of two.
    page_table: int32 [rows, pages]; rows, start, lengths: int32 [N]. scratch: see count_blocks.
    """
    page_size, group = k_pool.shape[1], q.shape[1] // k_pool.shape[2]
    for index, row in enumerate(rows.tolist()):
        position = torch.arange(int(start[index] + lengths[index]), device=q.device)
        slots = page_table[row, position // page_size] * page_size + position % page_size
        keys, values = (pool.flatten(0, 1)[slots.long()].float() for pool in (k_pool, v_pool))
        keys, values = (each.repeat_interleave(group, 1) for each in (keys, values))
        scores = torch.einsum("hd,thd->ht", q[index].float(), keys) * q.shape[-1] ** -0.5
        out[index] = torch.einsum("ht,thd->hd", scores.softmax(-1), values).to(out.dtype)
