"""Torch references: contexts of several requests copied out of their pages, one after another.

A layer with a window needs only the end of a context. Its context begins with the first page that
the window of the request's first new token touches.
"""

from typing import Final, TypeVar

import torch
from torch import Tensor

from minisgl.core.batch import Int32Array
from minisgl.kernel.fp8 import read_kv

_Ints = TypeVar("_Ints", Int32Array, Tensor)

TILE: Final = 128  # each context begins at a multiple of this many keys


def first_pages(start: _Ints, window: int | None, page_size: int) -> _Ints:
    """Return the first page of each request that its new tokens need, as an index into its pages.

    start: integers [n], the position of each request's first new token. window: the number of
    tokens to which a token attends, with itself; None: all, so that the first page is 0.
    """
    if window is None:
        return start * 0
    return (start - (window - 1)).clip(0) // page_size


def context_slots(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    slots: Tensor,
    window: int | None = None,
) -> None:
    """Compute the pool slots of the keys of n contexts, which end after start + lengths tokens.

    rows, start, lengths: int32 [n], n at most 8192. page_table: int32 [rows, max_pages]. window: as
    in first_pages; earlier pages are left out, and their entries in the page table are not used.
    slots: int32. Its beginning is overwritten with the slots of the first context, -1 up to a
    multiple of TILE, then the next context. On CUDA no host sync; graph-capturable.
    """
    begin = 0
    firsts = first_pages(start, window, page_size) * page_size
    ends = start + lengths
    for row, first, end in zip(rows.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        token = torch.arange(first, end, device=slots.device)
        pages = page_table[row, token // page_size]
        filled = begin + len(token)
        slots[begin:filled] = pages * page_size + token % page_size
        begin += -(-len(token) // TILE) * TILE
        slots[filled:begin] = -1


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
