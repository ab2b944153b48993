"""`Memory`: moves KV pages between the page pool, the prefix cache and the running requests."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.core.batch import EngineLike, Int32Array
from minisgl.core.rows import Rows
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.host import MIN_LOAD_PAGES, HostTier
from minisgl.kvcache.kinds import CacheKind, KindRoom, NewKind, Wanted
from minisgl.kvcache.node import CacheListener, CopyJob, Hit, RadixNode
from minisgl.kvcache.page_table import PageTable
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.states import state_kinds
from minisgl.kvcache.window import window_kinds


class Memory:
    """Knows the owner of every KV page, and moves pages when requests start, grow and end.

                 allocate                       publish
        pool  ------------->  a request's row  --------->  prefix cache
          ^                          |                          |
          +-------- release ---------+                          |
          +------------------------ evict ----------------------+

    A plan uses the pure methods: `hit` finds the cached prefix of a waiting request, and a Room
    counts the pages that the plan gives away. `apply` then calls `match`, `lock`, `open` and
    PageTable.append, and `grow` of each further kind. `publish` gives computed pages to the prefix
    cache while the request continues to use them. `release` takes the pages back.

    pool    the pages of full attention: one for each page of tokens of a row.
    table   the pages of each row, as the page table on the device has them.
    rows    the columns of the rows; in a scheduler its RequestTable.
    kinds   the further kinds of memory of the model (CacheKind).
    tree    the prefix cache.
    tier    its second place, in host memory; None: it has none.
    spare_tokens
            as for PageTable.
    shared  int32 [R]; the first `shared` pages of a row belong to the prefix cache and are locked.
            The other pages of the row belong to its request alone.
    caches  False keeps the prefix cache empty.

    I1  free + quarantined + cached + owned by rows == all pages, at every moment between steps.
    I2  When the prefix cache already has a page with the same tokens, the row's page table points
        to the cache's page before the request's own copy is freed.
    """

    def __init__(
        self,
        engine: EngineLike,
        rows: Rows,
        *,
        caches: bool = True,
        spare_tokens: int = 0,
        listeners: Sequence[CacheListener] = (),
        kinds: Sequence[NewKind] = (),
    ) -> None:
        """listeners: of the prefix cache. kinds: from extensions."""
        self.rows = rows
        self.page_size = engine.page_size
        self.spare_tokens = spare_tokens
        self.pool = FencedPool(engine.num_pages, rows.steps, self._evict)
        self.table = PageTable(engine, self.pool.allocate, engine.num_pages, spare_tokens)
        new_kinds = (*window_kinds(engine), *state_kinds(engine), *kinds)
        self.kinds: tuple[CacheKind, ...] = tuple(
            new_kind(engine, rows, self, index) for index, new_kind in enumerate(new_kinds)
        )
        parts = [kind.parts for kind in self.kinds]
        self.tree = RadixCache(self.page_size, rows.steps, listeners, parts)
        self.tier: HostTier | None = None
        if engine.copier is not None:
            self.tier = HostTier(engine.copier, self.tree, self.pool)
        self.shared: Int32Array = np.zeros(len(rows.known), dtype=np.int32)
        self.caches = caches
        self._nodes: dict[int, RadixNode] = {}  # by row: the locked end of its cached prefix
        self.evicted_pages_total = self.ended_pages_total = 0

    # --- for the plan: pure -------------------------------------------------------------------

    def pages_for(self, tokens: int) -> int:
        """Return the number of whole pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)

    def hit(self, wanted: Wanted) -> Hit:
        """Find the cached prefix of a waiting request, and change nothing."""
        return self.tree.hit(self._matchable(wanted), wanted.cache_salt)

    def _matchable(self, wanted: Wanted) -> Int32Array:
        """Return the tokens that a cached prefix may cover.

        They are none if the pool is too small for all pages of the request beside those that a hit
        pins: with a hit, the request could not begin even if no other request ran.
        """
        needed = self.pages_for(len(wanted.tokens))
        needed += min(1, self.pages_for(wanted.max_total_tokens) - needed)
        fits = needed + sum(kind.most_pins for kind in self.kinds) <= self.pool.size
        return wanted.tokens[: wanted.matchable if fits else 0]

    @property
    def available(self) -> int:
        """The number of pages that are free, or that eviction frees at once."""
        parts, tree = sum(kind.evictable()[0] for kind in self.kinds), self.tree
        return self.pool.num_free + tree.evictable_pages - tree.fenced_pages + parts

    @property
    def pending(self) -> int:
        """The number of pages that become available when the steps in flight and jobs end."""
        parts = sum(kind.evictable()[1] for kind in self.kinds)
        locked = 0 if self.tier is None else self.tier.locked_pages
        return self.pool.num_quarantined + self.tree.fenced_pages + parts + locked

    @property
    def jobs(self) -> Mapping[int, CopyJob]:
        """The copies to or from host memory. Their ends make pages available."""
        return {} if self.tier is None else self.tier.jobs

    def loads(self, hit: Hit) -> bool:
        """The host tier has so many further pages of the prefix that a load is worth its time."""
        return self.tier is not None and hit.loadable - hit.pages >= MIN_LOAD_PAGES

    def growing(self, rows: Int32Array, counts: Int32Array | int) -> int:
        """Return how many requests can still need a page after `rows` get `counts` more pages.

        A request can need a page while its pages have room for fewer tokens than its limit.
        """
        pages = self.table.counts.copy()
        pages[rows] += counts
        short = pages * self.page_size < self.rows.max_total_tokens
        return int((short & (pages > 0)).sum())

    def usage(self) -> tuple[int, int, int]:
        """The numbers of pages that requests use, of pages only in the cache, and of the others."""
        pool = self.pool
        evictable = self.tree.evictable_pages + sum(sum(kind.evictable()) for kind in self.kinds)
        free = pool.num_free + pool.num_quarantined
        return pool.size - free - evictable, evictable, free

    # --- for apply: writing -------------------------------------------------------------------

    def match(self, wanted: Wanted) -> Hit:
        """Find the same prefix as `hit`, and mark it as used."""
        return self.tree.match(self._matchable(wanted), wanted.cache_salt, wanted.session)

    def lock(self, hit: Hit) -> None:
        """Protect a prefix that `match` has found, and that a request will use, from eviction."""
        self.tree.lock(hit.node)
        for kind in self.kinds:
            kind.lock(hit)

    def load(self, hit: Hit) -> int:
        """Load the known pages of a prefix from host memory. `lock_known` has protected it.

        Returns the job whose end makes them usable; 0: they are.
        """
        assert self.tier is not None, "a plan loads from the host tier only; this is a bug"
        return self.tier.load(hit.last)

    def lock_known(self, hit: Hit) -> None:
        """Protect the known part of a prefix that `match` has found, in both places."""
        self.tree.lock(hit.last)

    def open(self, row: int, hit: Hit) -> None:
        """Let a row begin with its locked prefix, and with pages for its other tokens."""
        missing = self.pages_for(int(self.rows.known[row])) - hit.pages
        own = self.pool.allocate(missing)
        self.table.open_row(row, np.concatenate([hit.node.prefix_pages(), own]))
        self.shared[row] = hit.pages
        self._nodes[row] = hit.node
        for kind in self.kinds:
            kind.open(row, hit)

    def try_extend(self, row: int, tokens: int) -> bool:
        """Give a running row pages for `tokens` tokens in all; False if too few are available."""
        missing = self.pages_for(tokens) - int(self.table.counts[row])
        if missing > self.available:
            return False
        self.table.append(np.array([row]), np.array([max(missing, 0)]))
        return True

    def publish(self, row: int, req: Wanted, tokens: int) -> None:
        """Give the whole pages of the first `tokens` tokens of a request to the prefix cache.

        The request continues to use them. If the cache already has a page with the same tokens, the
        row then points to the cache's page and the request's own copy is freed (I2).
        """
        num_pages = tokens // self.page_size
        if num_pages > self.shared[row] and self.caches:
            self._insert(row, req, num_pages)
        for kind in self.kinds:
            kind.settle(row)

    def _insert(self, row: int, req: Wanted, num_pages: int) -> None:
        table, fence = self.table, int(self.rows.last_step[row])
        key = self.rows.tokens[row, : num_pages * self.page_size]
        row_pages = table.entries[row, :num_pages]
        node = self.tree.insert(key, row_pages, req.cache_salt, req.session)
        pages = node.prefix_pages()
        num_pages, row_pages = len(pages), row_pages[: len(pages)]
        self.tree.lock(node)
        self.tree.unlock(self._nodes[row], fence)
        self._nodes[row] = node
        duplicates = row_pages[pages != row_pages].copy()
        row_pages[:] = pages
        if len(duplicates):
            table.sent[row] = min(int(table.sent[row]), int(self.shared[row]))
        self.shared[row] = num_pages
        self.pool.release(duplicates, fence)
        for kind in self.kinds:
            kind.publish(row, node, num_pages)

    def release(self, row: int, req: Wanted, cached_tokens: int) -> None:
        """Take the pages from the row of a request.

        Its first `cached_tokens` tokens go to the prefix cache.
        The last step of the row is the fence: the pages are reused only after that step.
        """
        self.publish(row, req, cached_tokens)
        own = self.table.entries[row, self.shared[row] : self.table.counts[row]].copy()
        self.pool.release(own, int(self.rows.last_step[row]))
        self.table.counts[row] = 0
        for kind in self.kinds:
            kind.close(row)
        self.tree.unlock(self._nodes.pop(row), int(self.rows.last_step[row]))

    def end_session(self, session: str) -> None:
        """Evict the pages that only this session has used before all others."""
        self.ended_pages_total += self.tree.end_session(session)

    def flush(self) -> None:
        """Evict every cached prefix that no running request uses."""
        if self.tier is not None:
            self.tier.flush()
        self.tree.lift_fences()
        self._evict(self.tree.evictable_pages + sum(kind.evictable()[0] for kind in self.kinds))
        if self.tier is not None:
            self.tier.drop_all()

    def _evict(self, count: int) -> None:
        for evicted in self.tree.evict(count):
            self.evicted_pages_total += len(evicted.pages)
            self.pool.release(evicted.pages, evicted.fence)


@dataclass(slots=True, eq=False)
class Room:
    """Counts the memory that one plan gives to requests. It does not change the memory.

    available      pages of full attention that are left: free ones, and those that eviction frees
                   at once.
    kinds          the counters of the further kinds of memory.
    grown, counts  int32; the running rows that get pages, and the number of pages of each.
    locked         by node: its pages that new rows use.
    may_grow       requests that can still need a page; -1: not counted yet.
    """

    memory: Memory
    available: int
    kinds: list[KindRoom]
    grown: Int32Array
    counts: Int32Array
    locked: dict[int, int] = field(default_factory=dict)
    may_grow: int = -1

    def grow(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """Give each row the pages of its next tokens.

        If too few are left, gives none, and returns the rows that need some. Otherwise no row.
        """
        memory = self.memory
        ends = -(-(memory.rows.computed[rows] + tokens) // memory.page_size)
        lacks = ends - memory.table.counts[rows]
        short = lacks > 0
        if not np.count_nonzero(short):
            self.grown = self.counts = rows[:0]
            return rows[:0]
        growing, counts = rows[short], lacks[short]
        needed = int(counts.sum())
        if needed > self.available:
            return growing
        self.available -= needed
        self.grown, self.counts = growing, counts
        return rows[:0]

    def open(self, row: int, wanted: Wanted, hit: Hit, loads: bool = False) -> bool:
        """Give a waiting request its cached prefix and pages for all its tokens, if they are left.

        Spare pages are left: one for each running request that may still need a page, and one for
        `wanted` if it may need one. Without them, the next running request that needs a page would
        preempt `wanted`, and its prefill would be wasted.

        row: a number that no other request has. loads: the request gets no row yet. The host tier
        loads its prefix, and the further kinds count it when it gets a row.
        """
        memory = self.memory
        pages = memory.pages_for(len(wanted.tokens))
        spare = min(1, memory.pages_for(wanted.max_total_tokens) - pages)
        locked = {
            node.node_id: used
            for node, used in hit.nodes()
            if not memory.tree.is_locked(node) and used > self.locked.get(node.node_id, 0)
        }
        parts = [kind.parts.load_pages(hit.last) for kind in memory.kinds] if loads else []
        kinds = [] if loads else self.kinds
        left = self.available - sum(locked.values()) - sum(parts)
        left += sum(self.locked.get(node, 0) for node in locked)
        left -= sum(kind.pins(hit) for kind in kinds)
        own = pages - hit.pages
        if own + spare + self._growing() > left:
            return False
        if not all(kind.fits(wanted, hit) for kind in kinds):
            return False
        for kind in kinds:
            kind.open(row, wanted, hit)
        self.locked |= locked
        self.available = left - own
        self.may_grow += spare
        return True

    def cut(self, row: int, start: int, tokens: int) -> int:
        """Return how many of the next `tokens` tokens of a row have room in the further kinds."""
        for kind in self.kinds:
            tokens = kind.cut(row, start, tokens)
        return tokens

    def _growing(self) -> int:
        """Return the number of running requests that can still need a page."""
        if self.may_grow < 0:
            self.may_grow = self.memory.growing(self.grown, self.counts)
        return self.may_grow
