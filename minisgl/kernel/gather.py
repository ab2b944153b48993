"""Torch references: contexts of several requests copied out of their pages, one after another."""

from typing import Final

import torch
from torch import Tensor

from minisgl.kernel.fp8 import read_kv

TILE: Final = 128  # each context begins at a multiple of this many keys


def context_slots(
    rows: Tensor, start: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, slots: Tensor
) -> None:
    """Compute the pool slots of the keys of n contexts, of start + lengths tokens each.

    rows, start, lengths: int32 [n], n at most 8192. page_table: int32 [rows, max_pages].
    slots: int32. Its beginning is overwritten with the slots of the first context, -1 up to a
    multiple of TILE, then the next context. On CUDA no host sync; graph-capturable.
    """
    begin = 0
    for row, context in zip(rows.tolist(), (start + lengths).tolist(), strict=True):
        token = torch.arange(context, device=slots.device)
        pages = page_table[row, token // page_size]
        slots[begin : begin + context] = pages * page_size + token % page_size
        end = begin + -(-context // TILE) * TILE
        slots[begin + context : end] = -1
        begin = end


def gather_kv(
    k_pool: Tensor,
    v_pool: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Copy the key and value of slot slots[i] to keys[i] and values[i]; zeros if slots[i] is -1.

    k_pool, v_pool: [P, S, Hkv, D], contiguous. slots: int32 [N], N a multiple of TILE.
    keys, values: [N, Hkv, D], overwritten. scales: as in fp8.store_kv; with it the copies are
    dequantised. No host sync; graph-capturable.
    """
    real = (slots >= 0)[:, None, None]
    found = read_kv(k_pool, v_pool, slots.clamp(min=0).long(), scales, keys.dtype)
    for part, out in zip(found, (keys, values), strict=True):
        out.copy_(torch.where(real, part, torch.zeros_like(part)))
