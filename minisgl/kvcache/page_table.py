"""The host's copy of a page table."""

from collections.abc import Callable

import numpy as np

from minisgl.core.batch import EngineLike, Int32Array, PageUpdates


class PageTable:
    """Page ids of each row, for one KV pool.

    entries  int32 [R, max_pages]; the first counts[row] entries of a row are valid.
    counts   int32 [R]; number of valid entries.
    sent     int32 [R]; the device has the first sent[row] entries of a row.

    The device also gets `spare` entries after the last page of a row. They are the dummy page, so
    that a draft which the request cannot use overwrites no other page.
    """

    def __init__(
        self,
        engine: EngineLike,
        allocate: Callable[[int], Int32Array],
        dummy_page: int,
        spare_tokens: int,
    ) -> None:
        """allocate: returns as many page ids, int32. dummy_page: that of the KV pool. spare_tokens:
        tokens that must fit after the last page of a row."""
        self._allocate = allocate
        self.page_size = engine.page_size
        self._spare = -(-spare_tokens // self.page_size)
        num_rows, max_pages = engine.max_running_reqs, -(-engine.max_seq_len // self.page_size)
        self._dummy_page = dummy_page
        self.entries: Int32Array = np.zeros((num_rows, max_pages + self._spare), dtype=np.int32)
        self.counts: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.sent: Int32Array = np.zeros(num_rows, dtype=np.int32)

    def open_row(self, row: int, pages: Int32Array) -> None:
        """Replace the entries of a row."""
        self.entries[row, : len(pages)] = pages
        self.counts[row] = len(pages)
        self.sent[row] = 0

    def append(self, rows: Int32Array, counts: Int32Array) -> None:
        """Give counts[i] more pages, int32, to rows[i]. The rows must be distinct."""
        pages = self._allocate(int(counts.sum()))
        after = self.counts[rows] + counts
        cols = np.repeat(after - np.cumsum(counts), counts) + np.arange(len(pages))
        self.entries[np.repeat(rows, counts), cols] = pages
        self.counts[rows] = after

    def take_updates(self, rows: Int32Array) -> PageUpdates:
        """Return the entries of `rows` that the device does not have, and mark them as sent."""
        rows = rows[self.counts[rows] > self.sent[rows]]
        if not len(rows):
            return PageUpdates(rows, rows, rows)
        first, end = self.sent[rows], self.counts[rows]
        unsent = end + self._spare - first
        for nth in range(self._spare):
            self.entries[rows, end + nth] = self._dummy_page
        offsets = np.arange(unsent.sum()) - np.repeat(np.cumsum(unsent) - unsent, unsent)
        update_rows = np.repeat(rows, unsent)
        cols = (np.repeat(first, unsent) + offsets).astype(np.int32)
        self.sent[rows] = end
        return PageUpdates(update_rows, cols, self.entries[update_rows, cols])
