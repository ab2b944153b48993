"""Who owns which page: the running reqs, the prefix cache or nobody."""

import numpy as np

from minisgl.core import Int32Array, InvariantBroken
from minisgl.kvcache import FencedPool, Match, RadixCache
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable


class KVMemory:
    """Moves pages between page pool, prefix cache and rows.

    I1  free + quarantined + cached + owned by rows == all pages, at every moment between steps.
    I2  The first tree_pages pages of a row are the cache's and locked; the rest are the row's own.
    I3  A row points at the cache's pages before its own copies of the same tokens are freed.
    """

    def __init__(self, page_size: int, num_pages: int, publishes: bool) -> None:
        """publishes: what is computed goes to the prefix cache; it stays empty otherwise."""
        self.page_size = page_size
        self.pool = FencedPool(num_pages)
        self.cache = RadixCache(page_size)
        self._publishes = publishes
        self.evicted_pages_total = 0

    def pages_for(self, tokens: int) -> int:
        """Whole pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def match(self, req: Req) -> Match:
        """The cached prefix of a waiting req, leaving at least one token to compute.

        Who wants log-probabilities of the prompt has all of it computed.
        """
        usable = 0 if req.sampling.prompt_logprobs is not None else len(req.tokens) - 1
        return self.cache.match(req.tokens[:usable], req.cache_salt)

    def try_admit(self, req: Req, match: Match, table: RequestTable) -> bool:
        """Give a waiting req a row, its prefix and pages for all its tokens, or change nothing.

        One page more must be available for it, and for each req that runs, unless they can never
        need it: the first of them to need one would preempt it, and its prefill was for nothing.
        """
        self.cache.lock(match.node)
        own_pages = self.pages_for(len(req.tokens)) - len(match.pages)
        spare = min(1, self.pages_for(req.limit) - self.pages_for(len(req.tokens)))
        growing = table.rows.out & (table.pages.counts * self.page_size < table.limit)
        needed = own_pages + spare + int(growing.sum())
        fits = needed <= self.pool.num_free + self.cache.evictable_pages
        pages = self.try_allocate(own_pages) if fits else None
        if pages is None:  # it does not, or evicted pages are still fenced by a step in flight
            self.cache.unlock(match.node, 0)
            return False
        req.node, req.tree_pages = match.node, len(match.pages)
        table.open_row(req, np.concatenate([match.pages, pages]), req.tree_pages * self.page_size)
        return True

    def try_allocate(self, count: int) -> Int32Array | None:
        """`count` pages, evicting where needed; None when they are not free before a step ends."""
        self._evict(count - self.pool.num_free)
        if count > self.pool.num_free:
            return None
        return self.pool.allocate(count)

    def publish(self, req: Req, table: RequestTable, tokens: int) -> None:
        """Hand the row's first `tokens` tokens, in whole pages, to the cache; keep using them."""
        row, num_pages = req.row, tokens // self.page_size
        if num_pages <= req.tree_pages or not self._publishes:
            return
        key = table.tokens[row, : num_pages * self.page_size]
        mine = table.pages.entries[row, :num_pages]
        fence = int(table.last_step[row])
        node, pages = self.cache.insert(key, mine, req.cache_salt)
        self.cache.lock(node)
        assert req.node is not None, "a running req has a node: this is a bug"
        self.cache.unlock(req.node, fence)
        own = np.arange(num_pages) >= req.tree_pages
        duplicates = mine[own & (pages != mine)].copy()
        mine[:] = pages
        if len(duplicates):
            table.pages.sent[row] = min(int(table.pages.sent[row]), req.tree_pages)
        req.node, req.tree_pages = node, num_pages
        self.pool.release(duplicates, fence)

    def release(self, req: Req, table: RequestTable, cached_tokens: int) -> None:
        """Take row and pages from `req`; its first `cached_tokens` tokens go to the cache."""
        self.publish(req, table, cached_tokens)
        row, fence = req.row, int(table.last_step[req.row])
        own = table.pages.of_row(row)[req.tree_pages :].copy()
        self.pool.release(own, fence)
        assert req.node is not None, "a running req has a node: this is a bug"
        self.cache.unlock(req.node, fence)
        req.node, req.tree_pages = None, 0
        table.close_row(req)

    def flush(self) -> None:
        """Forget every cached prefix that no running req uses."""
        self._evict(self.cache.evictable_pages)

    def _evict(self, count: int) -> None:
        for evicted in self.cache.evict(count):
            self.evicted_pages_total += len(evicted.pages)
            self.pool.release(evicted.pages, evicted.fence)

    def check_integrity(self, table: RequestTable) -> None:
        """Raise InvariantBroken when a page has no owner or two (I1, I2)."""
        self.pool.check_integrity()
        self.cache.check_integrity()
        table.check_integrity()
        running = [req for req in table.reqs if req is not None]
        own = [table.pages.of_row(req.row)[req.tree_pages :] for req in running]
        owned = np.concatenate([np.empty(0, dtype=np.int32), *own])
        if len(np.unique(owned)) != len(owned):
            raise InvariantBroken("two reqs own the same page; this is a bug")
        cached = self.cache.evictable_pages + self.cache.locked_pages
        held = self.pool.num_free + self.pool.num_quarantined + cached + len(owned)
        if held != self.pool.size:
            raise InvariantBroken(
                f"free {self.pool.num_free} + quarantined {self.pool.num_quarantined} + cached "
                f"{cached} + running {len(owned)} != {self.pool.size} pages; this is a bug"
            )
