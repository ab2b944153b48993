"""`WindowManager`: the pages of window layers that the running requests hold."""

from dataclasses import dataclass

import numpy as np

from minisgl.core import Int32Array, WindowLayers
from minisgl.kvcache import ABSENT, Hit, Match, WindowPages
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable


@dataclass(slots=True)
class Holding:
    """The pages of a row, as one plan counts them.

    reserve, held  as in WindowManager.
    end            the row has pages for the tokens before page `end`.
    kept           number of pages that the row can give up.
    freed          int32; those of them that are then available at once.
    """

    reserve: int
    held: int
    end: int
    kept: int
    freed: Int32Array

    @property
    def charged(self) -> int:
        """The pages that no other row may get."""
        return max(self.reserve, self.held)


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

    def room(self) -> "WindowRoom":
        """Return the counters of one plan."""
        return WindowRoom(self)

    def open_row(self, req: Req, match: Match) -> None:
        """Let a row begin with the window at the end of its cached prefix."""
        assert match.windows is not None, "a match must have window pages; this is a bug"
        row, length = req.row, len(match.pages)
        first = max(length - self.span, 0)
        self.table.open_row(row, match.windows)
        self.table.sent[row] = self.first[row] = first
        self._reserve[row] = self.reserve_of(req.max_total_tokens)
        if match.known_pages > length:
            self._kept_first[row] = max(match.known_pages - self.span, first)
            self._kept_end[row] = match.known_pages

    def last_of(self, windows: Int32Array) -> Int32Array:
        """Return the window at the end of a cached prefix."""
        return windows[max(len(windows) - self.span, 0) :]

    def advance(self, rows: Int32Array) -> None:
        """Drop the pages that no later step of these running rows reads.

        A row whose prompt is computed but not published keeps them.
        """
        table = self._req_table
        ends = table.computed[rows] // self._page_size - self.span
        behind = ends > self.first[rows]
        behind &= self._published[rows] | (table.computed[rows] < table.prefill_end[rows])
        for row, end in zip(rows[behind].tolist(), ends[behind].tolist(), strict=True):
            self._drop_before(row, end)

    def grow(self, rows: Int32Array, tokens: Int32Array) -> None:
        """Give each row the pages of its next `tokens` tokens. A plan has counted them."""
        ends = -(-(self._req_table.computed[rows] + tokens) // self._page_size)
        missing = ends - self.table.counts[rows]
        for index in np.flatnonzero(missing > 0).tolist():
            row, count = int(rows[index]), int(missing[index])
            if count > max(int(self._reserve[row] - self.held[row]), 0) + self.spare:
                self._forget(row)
            self.pages.evict(count - self.pages.pool.num_free)
            self.table.extend(row, self.pages.allocate(count))

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

    def reserve_of(self, max_total_tokens: int) -> int:
        """Return the reserve of a request with this many tokens at most."""
        return min(self._full_reserve, -(-max_total_tokens // self._page_size))

    def holding(self, row: int) -> "Holding":
        """Return what a row holds."""
        behind = slice(self._kept_first[row], min(self._kept_end[row], self.first[row]))
        kept = self.table.entries[row, behind]
        freed = self.pages.freed(kept, int(self._req_table.last_step[row]))
        return Holding(
            int(self._reserve[row]),
            int(self.held[row]),
            int(self.table.counts[row]),
            len(kept),
            freed,
        )

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


class WindowRoom:
    """Counts the window pages that one plan gives to rows. It changes nothing else.

    WindowManager.open_row and WindowManager.grow then find the counted pages.
    """

    def __init__(self, windows: WindowManager) -> None:
        self._windows = windows
        self._page_size = windows.table.page_size
        self._spare = windows.spare
        self._available = windows.pages.available
        self._holdings: dict[int, Holding] = {}
        self._used: set[int] = set()  # cached pages of the new rows
        self._given_up: set[int] = set()  # pages that are available because rows give them up

    def open(self, row: int, max_total_tokens: int, hit: Hit) -> bool:
        """Count a new row, if its reserve fits. row: a number that no other row has.

        hit: the cached prefix.
        """
        assert hit.windows is not None, "a hit must have window pages; this is a bug"
        reserve = self._windows.reserve_of(max_total_tokens)
        window = self._windows.last_of(hit.windows)
        used = {*window.tolist()}
        idle = {*self._windows.pages.idle(window).tolist()} - self._used
        idle |= used & self._given_up
        if reserve > self._spare or len(idle) > self._available:
            return False
        self._used |= used
        self._given_up -= used
        self._available -= len(idle)
        self._holdings[row] = Holding(reserve, len(window), hit.pages, 0, window[:0])
        self._spare -= self._holdings[row].charged
        return True

    def grow(self, rows: Int32Array, starts: Int32Array) -> Int32Array:
        """Give each row a page for its token at `starts`. Returns the rows that have one."""
        at_end = np.flatnonzero(starts // self._page_size >= self._windows.table.counts[rows])
        starved = [i for i in at_end.tolist() if not self.cut(int(rows[i]), int(starts[i]), 1)]
        return np.delete(rows, starved)

    def cut(self, row: int, start: int, tokens: int) -> int:
        """Give a row pages for up to `tokens` tokens from `start` on.

        Returns the number of tokens for which it has pages.
        """
        holding = self._holdings.get(row)
        if holding is None:
            holding = self._holdings[row] = self._windows.holding(row)
        missing = -(-(start + tokens) // self._page_size) - holding.end
        if missing > 0:
            if not self._room(holding):
                self._give_up(holding)
            charged = holding.charged
            pages = min(missing, self._room(holding), self._available)
            holding.held += pages
            holding.end += pages
            self._available -= pages
            self._spare -= holding.charged - charged
        return max(min(tokens, holding.end * self._page_size - start), 0)

    def _room(self, holding: Holding) -> int:
        return max(holding.reserve - holding.held, 0) + self._spare

    def _give_up(self, holding: Holding) -> None:
        """Count the kept pages as given up."""
        charged = holding.charged
        holding.held -= holding.kept
        self._spare += charged - holding.charged
        freed = {*holding.freed.tolist()} - self._used
        self._given_up |= freed
        self._available += len(freed)
        holding.kept = 0
