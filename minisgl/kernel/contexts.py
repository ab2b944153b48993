"""Copies the contexts of a step's prompts out of their pages, for FlashInfer's ragged fa3 kernel.

FlashInfer's paged fa3 kernel loads keys with its threads, 96 at once. Its kernel for contiguous
keys loads them with TMA, 128 at once, and needs 14 % less time for the same queries.
"""

from itertools import pairwise
from typing import Final

import numpy as np
import torch
from torch import Tensor

from minisgl.core.batch import Int32Array
from minisgl.kernel.dispatch import context_slots
from minisgl.kernel.gather import TILE, first_pages

# The smallest room of a copy, in keys. It is enough for many prompts with short contexts.
_FEWEST_KEYS: Final = 16_384
# One read means that one query head of one prompt token reads one key. A copy pays if the number of
# reads in a layer reaches two limits.
# Reads for each copied key of a KV head, on average.
_LEAST_READS_PER_KEY: Final = 1_700
# Reads in total. The attention kernel takes 46 us for this number.
_LEAST_READS: Final = 50_000_000


class ContextCopy:
    """Contiguous keys and values of one layer at a time.

    A layer with a window needs only the end of a context. The copy then begins with the first page
    that the window of the prompt's first new token touches.

    Two steps that may run at the same time need two different ContextCopy objects.

    I1  The kernel reads up to TILE - 1 keys past a context's end and multiplies them by 0. The copy
        holds zeros there. Values of another request could be infinite, and 0 times infinity is NaN.
    """

    def __init__(
        self, longest: int, pool: Tensor, dtype: torch.dtype, window: int | None = None
    ) -> None:
        """Allocate room for at least `longest` keys of one context.

        pool: the keys of one layer, [P, S, Hkv, D]; the copy has the same device. dtype: of the
        copy. window: that of the layers (AttentionRule.window).
        """
        keys = -(-max(longest, _FEWEST_KEYS) // TILE) * TILE
        shape = (keys, *pool.shape[2:])
        self._keys, self._values = (pool.new_empty(shape, dtype=dtype) for _ in range(2))
        self._page_size, self._window = pool.shape[1], window

    @staticmethod
    def may_pay(window: int | None, group: int) -> bool:
        """Whether there are prompts for which `pays` is true. group: query heads per KV head."""
        return window is None or window * group >= _LEAST_READS_PER_KEY

    def holds(self, start: Int32Array, lengths: Int32Array) -> bool:
        """Whether each of n contexts fits alone. start, lengths: int32 [n], as in core.Batch."""
        return int(_filled(self._contexts(start, lengths)).max()) <= len(self._keys)

    def fits(self, start: Int32Array, lengths: Int32Array) -> bool:
        """Whether the contexts of n prompts fit. start, lengths: int32 [n], as in core.Batch."""
        return int(_filled(self._contexts(start, lengths)).sum()) <= len(self._keys)

    def groups(self, start: Int32Array, lengths: Int32Array) -> list[tuple[int, int]]:
        """Cut n prompts into consecutive groups that each fit: pairs of first and end."""
        cuts, keys = [0], 0
        for prompt, more in enumerate(_filled(self._contexts(start, lengths)).tolist()):
            if keys + more > len(self._keys):
                cuts.append(prompt)
                keys = 0
            keys += more
        return list(pairwise([*cuts, len(start)]))

    def pays(self, start: Int32Array, lengths: Int32Array, group: int) -> bool:
        """Whether copying the contexts first makes attention faster.

        start, lengths: int32 [n], as in core.Batch. group: query heads per KV head.

        On one H200 the copy of a key of one KV head takes 0.24 ns, and each query head that reads
        it from the copy saves 0.14 to 0.18 ps. The copy also costs the host 30 us per layer, which
        a short attention kernel does not hide.
        Source: bench/notebook/2026-11-22-kernels.md, "Prompts: over a copy of their contexts".
        """
        keys = self._contexts(start, lengths)
        of_token = keys - lengths + lengths // 2
        if self._window is not None:
            of_token = np.minimum(of_token, self._window)
        reads = int((lengths.astype(np.int64) * of_token).sum()) * group
        enough = reads * self._keys.shape[1] >= _LEAST_READS
        return enough and reads >= _LEAST_READS_PER_KEY * int(keys.sum())

    def layout(self, start: Int32Array, lengths: Int32Array) -> tuple[Tensor, Tensor]:
        """The indptrs of queries and of keys for the ragged kernel: int32 [2 n + 1] on the host.

        Each prompt has two entries. The first has the prompt's queries and the keys of its context.
        The second has no queries; its keys are the zeros that fill the context up to a multiple of
        TILE (I1).
        """
        contexts = self._contexts(start, lengths)
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
        keys: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute on the device the pool slots of n contexts; once per step.

        rows, start, lengths, page_table: as in gather.context_slots. keys: the last entry of the
        keys' indptr from `layout`. Returns slots, int32 [keys], and the buffers of the copy for
        keys and for values, each [keys, Hkv, D]. The caller passes the three tensors, in this
        order, to gather.gather_kv.
        """
        slots = torch.empty(keys, dtype=torch.int32, device=self._keys.device)
        context_slots(rows, start, lengths, page_table, self._page_size, slots, self._window)
        return slots, self._keys[:keys], self._values[:keys]

    def _contexts(self, start: Int32Array, lengths: Int32Array) -> Int32Array:
        """Return the number of keys that the copy holds of each of n contexts."""
        first = first_pages(start, self._window, self._page_size)
        contexts: Int32Array = start + lengths - first * self._page_size
        return contexts


def _filled(contexts: Int32Array) -> Int32Array:
    """Lengths of contexts, rounded up to a multiple of TILE."""
    filled: Int32Array = -(-contexts // TILE) * TILE
    return filled
