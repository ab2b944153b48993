"""A copy of the contexts of a step's prompts, for FlashInfer's kernel that reads contiguous keys.

Its paged fa3 kernel gathers keys by its threads' own loads, 96 at once; the one for contiguous keys
leaves that to the tensor memory accelerator, 128 at once, and takes 14 % less for the same queries.
"""

from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core import Int32Array
from minisgl.kernel.dispatch import context_slots
from minisgl.kernel.gather import TILE

_FEWEST_KEYS: Final = 16_384  # where no context can be so long: those of a chunk of many prompts
_LEAST_HEADS: Final = 1_700  # query heads that read a key, on average
_LEAST_READS: Final = 50_000_000  # of a key by a query head: 46 us


class ContextCopy:
    """Room for the keys and values of one layer at a time; calls in flight must not share it.

    I1  The kernel reads up to TILE - 1 keys behind a context's end, with weights of 0. So there are
        zeros: 0 times what another req has there may be NaN.
    """

    def __init__(self, page_table: Tensor, pool: Tensor) -> None:
        """Room for a context as long as page_table (int32 [rows, max_pages]) has columns, at least.

        pool: the keys of one layer, [P, S, Hkv, D], whose dtype and device the copy has.
        """
        longest = max(page_table.shape[1] * pool.shape[1], _FEWEST_KEYS)
        keys = -(-longest // TILE) * TILE
        self._slots = torch.empty(keys, dtype=torch.int32, device=pool.device)
        self._keys, self._values = (pool.new_empty(keys, *pool.shape[2:]) for _ in range(2))

    def fits(self, start: Int32Array, lengths: Int32Array) -> bool:
        """Whether there is room for n prompts' contexts: int32 [n] each, as in core.Batch."""
        return int(_filled(start + lengths).sum()) <= len(self._slots)

    def pays(self, start: Int32Array, lengths: Int32Array, group: int) -> bool:
        """Whether attention by a copy is faster. group: query heads for each KV head.

        On one H200 a key of a KV head is copied in 0.24 ns, and a query head reads it from the copy
        0.14 to 0.18 ps sooner. Where attention is short, the host's 30 us more a layer would show.
        Source: docs/measurements.md, "Prompts: over a copy of their contexts".
        """
        reads = int((lengths.astype(np.int64) * (start + lengths // 2)).sum()) * group
        enough = reads * self._keys.shape[1] >= _LEAST_READS
        return enough and reads >= _LEAST_HEADS * int((start + lengths).sum())

    def layout(self, start: Int32Array, lengths: Int32Array) -> tuple[Tensor, Tensor]:
        """Where queries and keys of n prompts begin: each int32 [2 n + 1] on the host.

        Every other one is the room behind a context, which has no queries.
        """
        contexts = start + lengths
        room = _filled(contexts) - contexts
        pairs = (lengths, np.zeros_like(room)), (contexts, room)
        counts = (np.concatenate(([0], np.stack(pair, axis=1).ravel())) for pair in pairs)
        queries, keys = (torch.from_numpy(count.cumsum(dtype=np.int32)) for count in counts)
        return queries, keys

    def find(
        self,
        rows: Tensor,
        start: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        page_size: int,
        keys: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Look up on the device where the n contexts lie: see gather.context_slots.

        keys: the last of `layout`. Returns what gather.gather_kv takes beside a layer's pool: the
        slots, and room for so many keys and values, [keys, Hkv, D].
        """
        context_slots(rows, start, lengths, page_table, page_size, self._slots)
        return self._slots[:keys], self._keys[:keys], self._values[:keys]


def _filled(contexts: Int32Array) -> Int32Array:
    filled: Int32Array = -(-contexts // TILE) * TILE
    return filled
