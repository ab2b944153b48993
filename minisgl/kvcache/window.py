"""`Windows`: the kind of memory of layers with a sliding window."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.batch import EngineLike, Int32Array, PageUpdates
from minisgl.core.rows import Rows
from minisgl.kvcache.kinds import CacheKind, KindRoom, NewKind, Wanted
from minisgl.kvcache.node import Hit, RadixNode
from minisgl.kvcache.page_table import PageTable
from minisgl.kvcache.window_pages import ABSENT, WindowPages

if TYPE_CHECKING:
    from minisgl.kvcache.memory import Memory


def window_kinds(engine: EngineLike) -> tuple[NewKind, ...]:
    """Return the kind of window layers, if the model has such layers."""
    return () if engine.window is None else (Windows,)


@dataclass(slots=True)
class Holding:
    """The pages of a row, as one plan counts them.

    reserve, held  as in Windows.
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


class Windows(CacheKind):
    """Gives window pages to the rows, and takes back those behind a window.

    Let k be the page of the next token of a row. The window of this token, and of all later ones,
    begins in page k - span or later. The row therefore holds the pages k - span to k, and during a
    step the pages of the step's tokens. While the result of a step with drafts is open, the next
    token is the one that follows if the step rejects all drafts: a window moves with the accepted
    tokens only.

    Each row has a reserve of span + 2 pages: span + 1 pages as above, and one page that waits for
    its fence. Tokens that one chunk must have together (Rows.largest_span) add their pages. A
    request needs no more to continue, so no request is preempted for want of window pages. Larger
    chunks and drafts use pages that are in no reserve.

    A request may match more cached pages than it can use, because their window is absent. It then
    keeps the window at the end of these pages until its prompt is published, so that the next
    request with the same prefix finds the window. If pages are short, it gives this window up.

    table    the page table. Column c holds page c of the row; columns before `first` are invalid.
    first    int32 [R]; the first page of the row's window.

    I1  The sum over all rows of max(reserve, pages held) is at most the number of pages. Pages that
        no row holds are free, in quarantine, or cached without a user. When no step is in flight, a
        row can therefore always get the pages of its reserve.
    """

    name = "window"

    def __init__(self, engine: EngineLike, rows: Rows, memory: "Memory", index: int) -> None:
        """index: of the part in RadixNode.parts."""
        window = engine.window
        assert window is not None, "the model must have window layers; this is a bug"
        self._rows = rows
        self.totals: dict[str, int] = {}
        num_rows, self._page_size = len(rows.known), engine.page_size
        self.span = window.span(self._page_size)
        self._window = window
        self.parts = self.pages = WindowPages(window.num_pages, self.span, rows.steps, index)
        allocate, dummy_page = self.pages.allocate, window.num_pages
        self.table = PageTable(engine, allocate, dummy_page, memory.spare_tokens)
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

    def lock(self, hit: Hit) -> None:
        """Add a user to the window at the end of a prefix."""
        self.pages.use(self.window_of(hit))

    def open(self, row: int, hit: Hit) -> None:
        """Let a row begin with the window at the end of its cached prefix."""
        first = max(hit.pages - self.span, 0)
        self.table.open_row(row, self.pages.at_end(hit.node, hit.pages))
        self.table.sent[row] = self.first[row] = first
        most, largest_span = self._rows.max_total_tokens[row], self._rows.largest_span[row]
        self._reserve[row] = self.reserve_of(int(most), int(largest_span))
        if hit.known_pages > hit.pages:
            self._kept_first[row] = max(hit.known_pages - self.span, first)
            self._kept_end[row] = hit.known_pages

    def window_of(self, hit: Hit) -> Int32Array:
        """Return the pages of the window at the end of a cached prefix."""
        return self.pages.at_end(hit.node, hit.pages)[max(hit.pages - self.span, 0) :]

    def advance(self, rows: Int32Array) -> None:
        """Drop the pages that no later step of these running rows reads.

        A row whose prompt is computed but not published keeps them.
        """
        table = self._rows
        ends = self._next_page(rows) - self.span
        behind = ends > self.first[rows]
        behind &= self._published[rows] | (table.computed[rows] < table.prefill_end[rows])
        for row, end in zip(rows[behind].tolist(), ends[behind].tolist(), strict=True):
            self._drop_before(row, end)

    def grow(self, rows: Int32Array, tokens: Int32Array) -> None:
        """Give each row the pages of its next `tokens` tokens. A plan has counted them."""
        ends = -(-(self._rows.computed[rows] + tokens) // self._page_size)
        missing = ends - self.table.counts[rows]
        for index in np.flatnonzero(missing > 0).tolist():
            row, count = int(rows[index]), int(missing[index])
            if count > max(int(self._reserve[row] - self.held[row]), 0) + self.spare:
                self._forget(row)
            self.table.append(rows[index, None], missing[index, None])

    def publish(self, row: int, node: RadixNode, pages: int) -> None:
        """Give the window at the end of the first `pages` pages to the tree.

        The tree gets one page more than a window, because the same prompt matches one page less: at
        least one token of it is computed.
        """
        windows = np.full(pages, ABSENT, dtype=np.int32)
        kept = slice(self._kept_first[row], self._kept_end[row])
        first = max(int(self.first[row]), pages - self.span - 1)
        for part in (kept, slice(first, self.table.counts[row])):
            windows[part] = self.table.entries[row, :pages][part]
        self.pages.fill(node, windows)

    def settle(self, row: int) -> None:
        """Drop the pages behind the window of a row, whose prompt needs no window any more."""
        self._published[row] = True
        self._forget(row)
        self._drop_before(row, int(self._next_page(np.array([row]))[0]) - self.span)

    def close(self, row: int) -> None:
        """Drop all pages of a row."""
        self._forget(row)
        self._drop_before(row, int(self.table.counts[row]))
        self.table.counts[row] = self.first[row] = self._reserve[row] = 0
        self._published[row] = False

    def updates(self, rows: Int32Array) -> PageUpdates:
        """The page table of window layers follows the one of full attention."""
        update_rows, cols, ids = self.table.take_updates(rows)
        return PageUpdates(update_rows + np.int32(len(self.first) + 1), cols, ids)

    def computed(self, rows: Int32Array) -> Int32Array:
        """Return Rows.computed of these rows."""
        return self._rows.computed[rows]

    def reserve_of(self, max_total_tokens: int, largest_span: int) -> int:
        """Return the reserve of a request with this many tokens at most."""
        full = self._window.reserve(self._page_size, largest_span)
        return min(full, -(-max_total_tokens // self._page_size))

    def holding(self, row: int) -> "Holding":
        """Return the window pages and the reserve of a row."""
        behind = slice(self._kept_first[row], min(self._kept_end[row], self.first[row]))
        kept = self.table.entries[row, behind]
        freed = self.pages.freed(kept, int(self._rows.last_step[row]))
        return Holding(
            int(self._reserve[row]),
            int(self.held[row]),
            int(self.table.counts[row]),
            len(kept),
            freed,
        )

    def _next_page(self, rows: Int32Array) -> Int32Array:
        """Return the page of the first token that the next step of each row forwards, or an earlier
        one. A step in flight gives a row one token at least."""
        return np.minimum(self._rows.computed[rows], self._rows.known[rows]) // self._page_size

    def _drop_before(self, row: int, end: int) -> None:
        """Drop the pages of the window before page `end`, except for the kept ones."""
        first = int(self.first[row])
        if end <= first:
            return
        columns = np.arange(first, end)
        kept = (columns >= self._kept_first[row]) & (columns < self._kept_end[row])
        dropped = self.table.entries[row, columns[~kept]]
        self.pages.leave(dropped, int(self._rows.last_step[row]))
        self.first[row] = end

    def _forget(self, row: int) -> None:
        """Drop the kept pages that are behind the window."""
        behind = min(int(self._kept_end[row]), int(self.first[row]))
        kept = self.table.entries[row, self._kept_first[row] : behind]
        self.pages.leave(kept, int(self._rows.last_step[row]))
        self._kept_first[row] = self._kept_end[row] = 0


class WindowRoom(KindRoom):
    """Counts the window pages that one plan gives to rows. It changes nothing else.

    Windows.open and Windows.grow then find the counted pages.
    """

    def __init__(self, windows: Windows) -> None:
        self._windows, self._page_size = windows, windows.table.page_size
        self._spare = windows.spare
        self._available = windows.pages.available
        self._holdings: dict[int, Holding] = {}
        self._used: set[int] = set()  # cached pages of the new rows
        self._given_up: set[int] = set()  # pages that are available because rows give them up

    def fits(self, wanted: Wanted, hit: Hit) -> bool:
        """The reserve of a new row is left, and the window of its cached prefix."""
        reserve = self._windows.reserve_of(wanted.max_total_tokens, wanted.largest_span)
        return reserve <= self._spare and len(self._idle(hit)) <= self._available

    def open(self, row: int, wanted: Wanted, hit: Hit) -> None:
        """Count a new row."""
        reserve = self._windows.reserve_of(wanted.max_total_tokens, wanted.largest_span)
        window = self._windows.window_of(hit)
        self._available -= len(self._idle(hit))
        self._used |= {*window.tolist()}
        self._given_up -= self._used
        self._holdings[row] = Holding(reserve, len(window), hit.pages, 0, window[:0])
        self._spare -= self._holdings[row].charged

    def _idle(self, hit: Hit) -> set[int]:
        """Return the available pages that a new row takes from its cached prefix."""
        window = self._windows.window_of(hit)
        idle = {*self._windows.pages.idle(window).tolist()} - self._used
        return idle | ({*window.tolist()} & self._given_up)

    def grow(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """Give each row pages for its next tokens. Returns the number of tokens that have pages."""
        starts, fitting = self._windows.computed(rows), tokens.copy()
        last_pages = (starts + tokens - 1) // self._page_size
        for i in np.flatnonzero(last_pages >= self._windows.table.counts[rows]).tolist():
            fitting[i] = self.cut(int(rows[i]), int(starts[i]), int(tokens[i]))
        return fitting

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
