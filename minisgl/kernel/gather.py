"""Contexts copied out of their pages, one after the other, for attention that reads them so."""

from typing import Final

import torch
from torch import Tensor

TILE: Final = 128  # each begins at a multiple of so many keys


def context_slots(
    rows: Tensor, start: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, slots: Tensor
) -> None:
    """Fill where the keys of n contexts lie in the pool, start + lengths tokens each.

    rows, start, lengths: int32 [n], n at most 8192. page_table: int32 [rows, max_pages]. slots:
    int32; its beginning is overwritten: the slots of each context in its order, then -1 up to a
    multiple of TILE. On CUDA no host sync; graph-capturable.
    """
    begin = 0
    for row, context in zip(rows.tolist(), (start + lengths).tolist(), strict=True):
        token = torch.arange(context, device=slots.device)
        pages = page_table[row, token // page_size]
        slots[begin : begin + context] = pages * page_size + token % page_size
        end = begin + -(-context // TILE) * TILE
        slots[begin + context : end] = -1
        begin = end


def gather_kv(k_pool: Tensor, v_pool: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """keys[i], values[i] = what is in the pool's slot slots[i], or zeros where that is -1.

    k_pool, v_pool: [P, S, Hkv, D], contiguous. slots: int32 [N], N a multiple of TILE; keys,
    values: [N, Hkv, D], overwritten. No host sync; graph-capturable.
    """
    real = (slots >= 0)[:, None, None]
    for pool, out in ((k_pool, keys), (v_pool, values)):
        found = pool.flatten(0, 1)[slots.clamp(min=0).long()]
        out.copy_(torch.where(real, found, torch.zeros_like(found)))
