"""`WindowManager`: the pages of window layers that the running requests hold."""

import numpy as np

from minisgl.core import Int32Array, WindowLayers
from minisgl.kvcache import ABSENT, Match, WindowPages
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable


class WindowManager:
    """Gives window pages to the rows, and takes back the pages behind the window of a row.

    Let k be the page of the next token of a row. The window of this token, and of all later ones,
    begins in page k - span or later. The row therefore holds the pages k - span to k, and during a
    step the pages of the step's tokens.

    Each row has a reserve of span + 2 pages: span + 1 pages as above, and one page that waits for
    its fence. A request needs no more to continue, so no request is preempted for want of window
    pages. Larger chunks use pages that are in no reserve.

    A request may match more cached pages than it can use, because their window is absent. It then
    keeps the window at the end of these pages until its prompt is published, so that the next
    request with the same prefix finds the window. If pages are short, it gives this window up.

    table    the page table. Column c holds page c of the row; columns before `first` are invalid.
    first    int32 [R]; the first page of the row's window.

    I1  The sum over all rows of max(reserve, pages held) is at most the number of pages. Pages that
        no row holds are free, in quarantine, or cached without a user. When no step is in flight, a
        row can therefore always get the pages of its reserve.
    """

    def __init__(self, window: WindowLayers, req_table: RequestTable) -> None:
        """req_table: has the lengths of the rows, and their page table for window layers."""
        assert req_table.window_pages is not None, "rows must have window pages; this is a bug"
        self._req_table, self.table = req_table, req_table.window_pages
        num_rows, self._page_size = len(self.table.counts), self.table.page_size
        self.span = window.span(self._page_size)
        self._full_reserve = window.reserve(self._page_size)
        self.pages = WindowPages(window.num_pages, self.span)
        self.first: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._reserve: Int32Array = np.zeros(num_rows, dtype=np.int32)
        # The row also holds the pages kept_first to kept_end - 1 that are behind its window.
        self._kept_first: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._kept_end: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self._published = np.zeros(num_rows, dtype=np.bool_)

    @property
    def held(self) -> Int32Array:
        """int32 [R]; number of pages that each row holds."""
        kept = np.minimum(self._kept_end, self.first) - self._kept_first
        return self.table.counts - self.first + np.maximum(kept, 0)

    @property
    def spare(self) -> int:
        """The number of pages that are neither held nor in a reserve."""
        return self.pages.pool.size - int(np.maximum(self._reserve, self.held).sum())

    def usage(self) -> tuple[int, int, int]:
        """The numbers of pages that requests use, of pages only in the cache, and of the others."""
        in_use = self.pages.users > 0
        used, evictable = int(in_use.sum()), int((self.pages.cached & ~in_use).sum())
        return used, evictable, self.pages.pool.size - used - evictable

    def fits(self, req: Req) -> bool:
        """The reserve of a waiting request is free."""
        return self._reserve_of(req) <= self.spare

    def open_row(self, req: Req, match: Match) -> None:
        """Let a row begin with the window at the end of its cached prefix."""
        assert match.windows is not None, "a match must have window pages; this is a bug"
        row, length = req.row, len(match.pages)
        first = max(length - self.span, 0)
        self.table.open_row(row, match.windows)
        self.table.sent[row] = self.first[row] = first
        self.pages.use(match.windows[first:])
        self._reserve[row] = self._reserve_of(req)
        if match.known_pages > length:
            self._kept_first[row] = max(match.known_pages - self.span, first)
            self._kept_end[row] = match.known_pages

    def grow(self, rows: Int32Array) -> Int32Array:
        """Give each decoding row a page for its next token. Returns the rows that have one.

        A row without a page gets one when the step in flight has been resolved.
        """
        pages = self._req_table.computed[rows] // self._page_size
        moved = (pages >= self.table.counts[rows]) | (pages - self.span > self.first[rows])
        starved = [row for row in rows[moved].tolist() if not self.extend(row, 1)]
        return rows[~np.isin(rows, starved)] if starved else rows

    def extend(self, row: int, tokens: int) -> int:
        """Give a row pages for up to `tokens` tokens of the next step.

        Returns the number of tokens for which it has pages.
        """
        start = int(self._req_table.computed[row])
        if self._published[row] or start < self._req_table.prefill_end[row]:
            self._drop_before(row, start // self._page_size - self.span)
        missing = -(-(start + tokens) // self._page_size) - int(self.table.counts[row])
        if missing > 0:
            if not (room := self._room(row)):
                self._forget(row)
                room = self._room(row)
            self.table.extend(row, self._allocate(min(missing, room)))
        return max(min(tokens, int(self.table.counts[row]) * self._page_size - start), 0)

    def windows_of(self, row: int, num_pages: int) -> Int32Array:
        """Return the window pages of the first num_pages pages of a row, ABSENT behind the window.

        They include one page more than a window, because the same prompt matches one page less: at
        least one token of it is computed.
        """
        windows = np.full(num_pages, ABSENT, dtype=np.int32)
        kept = slice(self._kept_first[row], self._kept_end[row])
        first = max(int(self.first[row]), num_pages - self.span - 1)
        for part in (kept, slice(first, self.table.counts[row])):
            windows[part] = self.table.entries[row, :num_pages][part]
        return windows

    def settle(self, row: int) -> None:
        """Drop the pages behind the window of a row. Its prompt has been published."""
        self._published[row] = True
        self._forget(row)
        self._drop_before(row, int(self._req_table.computed[row]) // self._page_size - self.span)

    def close_row(self, row: int) -> None:
        """Drop all pages of a row. The request table still has its last step."""
        self._forget(row)
        self._drop_before(row, int(self.table.counts[row]))
        self.table.counts[row] = self.first[row] = self._reserve[row] = 0
        self._published[row] = False

    def _reserve_of(self, req: Req) -> int:
        return min(self._full_reserve, -(-req.max_total_tokens // self._page_size))

    def _room(self, row: int) -> int:
        """The number of pages that a row may get."""
        return max(int(self._reserve[row] - self.held[row]), 0) + self.spare

    def _allocate(self, count: int) -> Int32Array:
        """Allocate up to `count` pages; evict cached pages if needed."""
        pool = self.pages.pool
        self.pages.evict(count - pool.num_free)
        return self.pages.allocate(min(count, pool.num_free))

    def _drop_before(self, row: int, end: int) -> None:
        """Drop the pages of the window before page `end`, except for the kept ones."""
        first = int(self.first[row])
        if end <= first:
            return
        columns = np.arange(first, end)
        kept = (columns >= self._kept_first[row]) & (columns < self._kept_end[row])
        dropped = self.table.entries[row, columns[~kept]]
        self.pages.drop(dropped, int(self._req_table.last_step[row]))
        self.first[row] = end

    def _forget(self, row: int) -> None:
        """Drop the kept pages that are behind the window."""
        behind = min(int(self._kept_end[row]), int(self.first[row]))
        kept = self.table.entries[row, self._kept_first[row] : behind]
        self.pages.drop(kept, int(self._req_table.last_step[row]))
        self._kept_first[row] = self._kept_end[row] = 0
