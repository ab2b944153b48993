"""`KVManager`: moves KV pages between the page pool, the prefix cache and the running requests."""

from collections.abc import Iterable

import numpy as np

from minisgl.core import EngineLike, Int32Array
from minisgl.kvcache import (
    CacheListener,
    FencedPool,
    Hit,
    Match,
    RadixCache,
    RadixNode,
    common_prefix,
)
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable
from minisgl.scheduler.window_manager import WindowManager

MIN_SHARED_TOKENS = 64  # a request does not wait a step for a shorter shared prefix


class KVManager:
    """Knows the owner of every KV page, and moves pages when requests start, grow and end.

                 allocate                       publish
        pool  ------------->  a request's row  --------->  prefix cache
          ^                          |                          |
          +-------- release ---------+                          |
          +------------------------ evict ----------------------+

    `match` finds the cached prefix of a waiting request. `shared_with_older` finds a prefix that an
    older request computes, so that the request waits for it. `try_admit` gives the request a row,
    locks the cached prefix and allocates pages for the other tokens. `publish` gives computed pages
    to the prefix cache while the request continues to use them. `release` takes the row and the
    pages back.

    In a model with window layers, `windows` does the same with the pages of these layers.

    I1  free + quarantined + cached + owned by rows == all pages, at every moment between steps.
    I2  The first `shared_pages` pages of a row belong to the prefix cache and are locked. The other
        pages of the row belong to its request alone.
    I3  When the prefix cache already has a page with the same tokens, the row's page table points
        to the cache's page before the request's own copy is freed.
    """

    def __init__(
        self,
        engine: EngineLike,
        table: RequestTable,
        use_prefix_cache: bool,
        listener: CacheListener | None = None,
    ) -> None:
        """use_prefix_cache: False keeps the prefix cache empty. listener: of the prefix cache.

        `windows` is None if the model has no window layers.
        """
        self.table = table
        self.page_size = engine.page_size
        self.pool = FencedPool(engine.num_pages)
        self.windows = None if engine.window is None else WindowManager(engine.window, table)
        window_pages = None if self.windows is None else self.windows.pages
        self.cache = RadixCache(self.page_size, listener, window_pages)
        self._use_prefix_cache = use_prefix_cache
        self._nodes: dict[int, RadixNode] = {}  # by row: the locked end of its cached prefix
        self.evicted_pages_total = 0

    def pages_for(self, tokens: int) -> int:
        """Return the number of whole pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def hit(self, req: Req) -> Hit:
        """Find the cached prefix of a waiting request, and change nothing.

        At least one token is left to compute. A request for log-probabilities of its prompt
        computes the whole prompt, so it matches nothing.
        """
        return self.cache.hit(self._usable_tokens(req), req.cache_salt)

    def match(self, req: Req) -> Match:
        """Find the same prefix, and mark it as used."""
        return self.cache.match(self._usable_tokens(req), req.cache_salt)

    def _usable_tokens(self, req: Req) -> Int32Array:
        usable = 0 if req.sampling.prompt_logprobs is not None else len(req.tokens) - 1
        return req.tokens[:usable]

    def room(self) -> "Room":
        """Return the counters of one plan."""
        return Room(self)

    def shared_with_older(self, req: Req, cached: int, others: Iterable[Req]) -> int:
        """Return the number of leading tokens of `req` that an older request in `others` computes.

        cached: the tokens of `req` that the cache has.
        The result is 0 if fewer than half of the uncached tokens are shared: `req` does not wait
        for so few. With this rule, the n choices of one prompt compute the prompt once. A burst of
        requests with the same system prompt computes the system prompt once.

        A request waits for older requests only, and these decrease in number. If it also waited for
        newer requests, it could wait forever: a newer request is admitted before it, computes the
        shared prefix and fails, then the next newer request does the same, and so on.
        """
        if req.sampling.prompt_logprobs is not None or not self._use_prefix_cache:
            return 0
        half = (len(req.tokens) - cached + 1) // 2
        min_shared = self.pages_for(cached + max(half, MIN_SHARED_TOKENS)) * self.page_size
        # The first min_shared tokens have to be equal. Compare the last of these tokens first,
        # because most prompts differ there. The slice is empty if the prompt has fewer tokens.
        last_needed = req.tokens[min_shared - 1 : min_shared].tobytes()
        if not last_needed:
            return 0
        for other in others:
            older = other.arrival_index < req.arrival_index and other.cache_salt == req.cache_salt
            if other.priority > req.priority or not older:
                continue  # a request of a later priority may have to wait for `req`
            if other.tokens[min_shared - 1 : min_shared].tobytes() == last_needed:
                shared = common_prefix(req.tokens[:-1], other.tokens)
                if shared >= min_shared:
                    return shared // self.page_size * self.page_size
        return 0

    def lock(self, match: Match) -> None:
        """Protect a prefix, which a request will use, from eviction."""
        self.cache.lock(match.node)
        if self.windows is not None and match.windows is not None:
            self.windows.pages.use(self.windows.last_of(match.windows))

    def open_row(self, req: Req, match: Match) -> None:
        """Give a waiting request a row, its locked prefix and pages for its other tokens."""
        pages = self.allocate(self.pages_for(len(req.tokens)) - len(match.pages))
        req.shared_pages = len(match.pages)
        cached_tokens = req.shared_pages * self.page_size
        self.table.open_row(req, np.concatenate([match.pages, pages]), cached_tokens)
        self._nodes[req.row] = match.node
        if self.windows is not None:
            self.windows.open_row(req, match)

    def grow(self, rows: Int32Array, counts: Int32Array) -> None:
        """Give `counts` more pages, int32, to these rows. A plan has counted them."""
        if not len(rows):
            return
        pages = self.allocate(int(counts.sum()))
        for nth in range(int(counts.max())):
            growing = rows[counts > nth]
            self.table.pages.append(growing, pages[: len(growing)])
            pages = pages[len(growing) :]

    def grow_windows(self, rows: Int32Array, tokens: Int32Array) -> None:
        """The same for the pages of window layers."""
        if self.windows is not None:
            self.windows.grow(rows, tokens)

    def advance(self, rows: Int32Array) -> None:
        """Drop the pages that no later step of these running rows reads."""
        if self.windows is not None:
            self.windows.advance(rows)

    @property
    def available(self) -> int:
        """The number of pages that can be allocated now: free ones and those `evict` frees."""
        return self.pool.num_free + self.cache.evictable_pages - self.cache.fenced_pages

    @property
    def pending(self) -> int:
        """The number of pages that become available when the steps in flight are resolved."""
        return self.pool.num_quarantined + self.cache.fenced_pages

    def try_allocate(self, count: int) -> Int32Array | None:
        """Allocate `count` pages; return None if fewer are available."""
        return self.allocate(count) if count <= self.available else None

    def allocate(self, count: int) -> Int32Array:
        """Allocate `count` available pages; evict cached pages if needed."""
        self._evict(count - self.pool.num_free)
        return self.pool.allocate(count)

    def try_extend(self, req: Req, tokens: int) -> bool:
        """Give a running request pages for `tokens` tokens; return False when pages are short."""
        missing = self.pages_for(tokens) - int(self.table.pages.counts[req.row])
        pages = self.try_allocate(max(missing, 0))
        if pages is not None:
            self.table.pages.extend(req.row, pages)
        return pages is not None

    def publish(self, req: Req, tokens: int) -> None:
        """Give the whole pages of the row's first `tokens` tokens to the prefix cache.

        The request continues to use them. If the cache already has a page with the same tokens, the
        row then points to the cache's page and the request's own copy is freed (I3).
        """
        num_pages = tokens // self.page_size
        if num_pages > req.shared_pages and self._use_prefix_cache:
            self._insert(req, num_pages)
        if self.windows is not None:
            self.windows.settle(req.row)

    def _insert(self, req: Req, num_pages: int) -> None:
        table, row = self.table, req.row
        windows = None if self.windows is None else self.windows.windows_of(row, num_pages)
        key = table.tokens[row, : num_pages * self.page_size]
        row_pages = table.pages.entries[row, :num_pages]
        fence = int(table.last_step[row])
        node, pages, *_ = self.cache.insert(key, row_pages, req.cache_salt, windows)
        self.cache.lock(node)
        self.cache.unlock(self._nodes[row], fence)
        self._nodes[row] = node
        duplicates = row_pages[pages != row_pages].copy()
        row_pages[:] = pages
        if len(duplicates):
            table.pages.sent[row] = min(int(table.pages.sent[row]), req.shared_pages)
        req.shared_pages = num_pages
        self.pool.release(duplicates, fence)

    def release(self, req: Req, cached_tokens: int) -> None:
        """Take row and pages from `req`. Its first `cached_tokens` tokens go to the prefix cache.

        The last step that contains the request fences the row and the pages: they are reused only
        after that step has been resolved.
        """
        self.publish(req, cached_tokens)
        table, row = self.table, req.row
        fence = int(table.last_step[row])
        own = table.pages.entries[row, req.shared_pages : table.pages.counts[row]]
        self.pool.release(own.copy(), fence)
        if self.windows is not None:
            self.windows.close_row(row)
        self.cache.unlock(self._nodes.pop(row), fence)
        table.close_row(req)

    def resolve(self, step: int) -> None:
        """Free the pages and rows whose fence is at most `step`, the newest completed step."""
        self.table.rows.resolve(step)
        self.pool.resolve(step)
        self.cache.resolve(step)
        if self.windows is not None:
            self.windows.pages.pool.resolve(step)

    def flush(self) -> None:
        """Evict every cached prefix that no running request uses."""
        self.cache.lift_fences()
        self._evict(self.cache.evictable_pages)

    def _evict(self, count: int) -> None:
        for evicted in self.cache.evict(count):
            self.evicted_pages_total += len(evicted.pages)
            self.pool.release(evicted.pages, evicted.fence)


class Room:
    """Counts the rows' pages that one plan gives away. It changes nothing else.

    available      pages that are left.
    pending        as in KVManager.
    grown, counts  int32; the running rows that get pages, and the number of pages of each.
    """

    def __init__(self, memory: KVManager) -> None:
        self._memory = memory
        self._windows = None if memory.windows is None else memory.windows.room()
        self.available, self.pending = memory.available, memory.pending
        self._locked: dict[int, int] = {}  # by node: its pages that new rows use
        self.grown: Int32Array = np.empty(0, dtype=np.int32)
        self.counts = self.grown
        self._may_grow: int | None = None  # requests that can still need a page

    def lacks(self, rows: Int32Array, tokens: Int32Array | int) -> Int32Array:
        """Return the number of pages, int32, that each row lacks for its next `tokens` tokens."""
        memory, table = self._memory, self._memory.table
        ends = -(-(table.computed[rows] + tokens) // memory.page_size)
        lacks: Int32Array = np.maximum(ends - table.pages.counts[rows], 0)
        return lacks

    def grow(self, rows: Int32Array, tokens: Int32Array) -> bool:
        """Give each row the pages of its next tokens; False, and no pages, if too few are left."""
        lacks = self.lacks(rows, tokens)
        count = int(lacks.sum())
        if count > self.available:
            return False
        if count:
            self.available -= count
            self.grown, self.counts = rows[lacks > 0], lacks[lacks > 0]
        return True

    def with_parts(self, rows: Int32Array) -> Int32Array:
        """Give each row a page of the other kinds for its next token. Returns rows that have it."""
        if self._windows is None:
            return rows
        return self._windows.grow(rows, self._memory.table.computed[rows])

    def open(self, row: int, req: Req, hit: Hit) -> bool:
        """Give a waiting request its cached prefix and pages for all its tokens, if they are left.

        Spare pages stay: one for each running request that can still need a page, and one for `req`
        if it can. Without the spare pages, the next running request that needs a page would preempt
        `req`, and its prefill would be wasted. A request can still need a page while its pages have
        room for fewer tokens than its max_total_tokens.

        row: a number that no other request has.
        """
        memory = self._memory
        pages = memory.pages_for(len(req.tokens))
        spare = min(1, memory.pages_for(req.max_total_tokens) - pages)
        locked = {
            node.node_id: used
            for node, used in hit.path
            if not memory.cache.is_locked(node) and used > self._locked.get(node.node_id, 0)
        }
        left = self.available - sum(locked.values())
        left += sum(self._locked.get(node, 0) for node in locked)
        own = pages - hit.pages
        if own + spare + self._growing() > left:
            return False
        if not (self._windows is None or self._windows.open(row, req.max_total_tokens, hit)):
            return False
        self._locked |= locked
        self.available = left - own
        self._may_grow = self._growing() + spare
        return True

    def cut(self, row: int, start: int, tokens: int) -> int:
        """Give a row pages of the other kinds for up to `tokens` tokens from `start` on.

        Returns the number of tokens for which it has pages.
        """
        return tokens if self._windows is None else self._windows.cut(row, start, tokens)

    def _growing(self) -> int:
        """Return the number of running requests that can still need a page."""
        if self._may_grow is None:
            table = self._memory.table
            counts = table.pages.counts.copy()
            counts[self.grown] += self.counts
            short = counts * self._memory.page_size < table.max_total_tokens
            self._may_grow = int((table.rows.allocated & short).sum())
        return self._may_grow
