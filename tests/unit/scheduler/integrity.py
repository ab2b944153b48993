"""Checks of the invariants of pools, prefix cache, request table and scheduler between two steps.

Each function raises AssertionError where an invariant of the class is broken. The checks walk
whole data structures, so only tests call them.
"""

from itertools import product

import numpy as np

from minisgl.core.batch import Batch
from minisgl.kvcache.eviction import _heap_of
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.host import HostTier
from minisgl.kvcache.memory import Memory
from minisgl.kvcache.node import NodeClass, Place, RadixNode
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.states import States
from minisgl.kvcache.window import Windows
from minisgl.kvcache.window_pages import ABSENT
from minisgl.scheduler import Scheduler
from minisgl.scheduler.request_table import RequestTable
from tests.unit.scheduler.fake_engine import FakeEngine, slot_values
from tests.unit.scheduler.fake_states import decoded


def check_scheduler(scheduler: Scheduler) -> None:
    """Each page, each row and each request has exactly one owner."""
    memory, table = scheduler.memory, scheduler.table
    pool, cache = memory.pool, memory.tree
    check_pool(pool)
    cached = check_cache(cache)
    check_table(table)
    check_batches(scheduler)
    running = [req for req in table.reqs if req is not None]
    pages, shared = memory.table, memory.shared
    own = [pages.entries[req.row, shared[req.row] : pages.counts[req.row]] for req in running]
    assert ((memory.table.counts > 0) == table.rows.allocated).all()
    owned = np.concatenate([np.empty(0, dtype=np.int32), *own])
    assert len(np.unique(owned)) == len(owned), "two requests own the same page"
    snapshots = sum(check_states(states, memory) for states in states_of(memory))
    total = pool.num_free + pool.num_quarantined + cached + len(owned) + snapshots
    assert total == pool.size, (
        f"free {pool.num_free} + quarantined {pool.num_quarantined} + cached {cached} + running "
        f"{len(owned)} != {pool.size} pages"
    )
    for windows in windows_of(memory):
        check_windows(windows, cache, table)
    if scheduler.idle and not memory.jobs:
        assert cached == cache.evictable_pages, "idle, but pages are locked"


def windows_of(memory: Memory) -> list[Windows]:
    """The kind of window layers, if the model has some."""
    return [kind for kind in memory.kinds if isinstance(kind, Windows)]


def states_of(memory: Memory) -> list[States]:
    """The kind of layers with recurrent states, if the model has some."""
    return [kind for kind in memory.kinds if isinstance(kind, States)]


def check_states(states: States, memory: Memory) -> int:
    """Each snapshot has one owner and is right about it. Returns the number of their pages."""
    found = states.snapshots
    cached = [s for node in nodes_of(memory.tree) if (s := found.at(node)) is not None]
    snapshots = [*found.own, *cached]
    requests = {saving.request for saving in states._savings.values()}
    assert {snapshot.request for snapshot in found.own} <= requests, "a snapshot has no owner"
    for snapshot in cached:
        assert snapshot.node is not None
        assert found.at(snapshot.node) is snapshot, "a snapshot is at another node"
        assert sum(len(each.tokens) for each in snapshot.node.path()) == snapshot.tokens
        place = snapshot.node.place
        held = snapshot in found._lru[snapshot.reused]
        assert held == (snapshot.on_gpu or place is Place.LOADING)
        assert snapshot.blocks is None or place is not Place.GPU
    held_ones = [s for s in cached if s.on_gpu or s.is_copied]
    snapshots = [*found.own, *held_ones]
    assert found.num_cached == len(held_ones), "a snapshot is lost"
    for group in found._lru:
        uses = [snapshot.last_use for snapshot in group]
        assert uses == sorted(uses)
    pages = np.concatenate([np.empty(0, dtype=np.int32), *(s.pages for s in snapshots)])
    assert len(np.unique(pages)) == len(pages), "two snapshots own the same page"
    assert memory.pool.allocated[pages].all()
    assert {*found.fenced, *states._loads.values()} <= set(snapshots)
    for snapshot in snapshots:
        assert not snapshot.freed
        is_fenced = snapshot.loads > 0 or snapshot.fence > found._steps.resolved
        is_fenced |= snapshot.is_copied
        assert is_fenced == (snapshot in found.fenced)
    assert sum(s.loads for s in snapshots) == len(states._loads)
    assert sum(states.evictable()) == len(pages)
    return len(pages)


def check_windows(windows: Windows, cache: RadixCache, table: RequestTable) -> None:
    """Each window page is free or fenced, or its recorded users and cache entry are right."""
    pages = windows.pages
    check_pool(pages.pool)
    users = np.zeros(pages.pool.size, dtype=np.int32)
    held = np.zeros(len(windows.first), dtype=np.int32)
    for req in table.reqs:
        if req is None:
            continue
        row, first = req.row, windows.first[req.row]
        kept = slice(windows._kept_first[row], min(windows._kept_end[row], first))
        for part in (slice(first, windows.table.counts[row]), kept):
            mine = windows.table.entries[row, part]
            assert len(np.unique(mine)) == len(mine), "a row holds a window page twice"
            users[mine] += 1
            held[row] += len(mine)
        next_page = min(int(table.computed[row]), int(table.known[row])) // cache._page_size
        assert first <= max(next_page - windows.span, 0), "a window page was dropped too early"
    assert (held == windows.held).all()
    assert np.maximum(held, windows._reserve).sum() <= pages.pool.size, "a reserve is not covered"
    assert (users == pages.users).all(), "the users of a window page are miscounted"
    parts = [pages.part_of(node) for node in nodes_of(cache)]
    cached = [part[part != ABSENT] for part in parts]
    stored = np.concatenate([np.empty(0, dtype=np.int32), *cached])
    assert len(np.unique(stored)) == len(stored), "a window page is cached twice"
    assert sorted(stored) == np.flatnonzero(pages.cached).tolist()
    assert (pages.pool.allocated == (pages.cached | (users > 0))).all(), "a window page is lost"
    nodes, entries = nodes_of(cache), pages._lru.keys()
    live = {node for node in nodes if (pages.part_of(node) != ABSENT).any()}
    assert live <= entries, "a window page cannot be evicted"
    assert entries <= set(nodes), "an evicted node is in the index of windows"
    assert all(len(pages.part_of(node)) == len(node.pages) for node in nodes)


def check_held(scheduler: Scheduler, batch: Batch) -> None:
    """Each row of the last step holds a window, one page and the pages of the step's tokens.

    A row whose prompt is not published may hold the window of another prefix as well. A row with
    drafts may hold the pages of those that were rejected. While the step is in flight, no page that
    it reads is free.
    """
    for windows in windows_of(scheduler.memory):
        check_held_by(windows, scheduler, batch)


def check_held_by(windows: Windows, scheduler: Scheduler, batch: Batch) -> None:
    """The same for one kind."""
    page_size = scheduler.memory.page_size
    in_flight = any(step.batch is batch for step in scheduler._in_flight)
    free = windows.pages.pool._stack[: windows.pages.pool.num_free]
    for row, start, length in zip(batch.rows, batch.start, batch.lengths, strict=True):
        pages = slice(max(start // page_size - windows.span, 0), -(-(start + length) // page_size))
        if in_flight:
            read = windows.table.entries[row, pages]
            assert not np.isin(read, free).any(), "a page that the step in flight reads is free"
        if scheduler.table.reqs[row] is None:
            continue
        step_pages = (start + length - 1) // page_size - start // page_size
        rejected = scheduler.view.max_drafts * (1 + scheduler.view.in_flight)
        held = windows.held[row] - step_pages - -(-rejected // page_size)
        if windows._published[row]:
            assert held <= windows.span + 1, "pages behind a window are held"
        elif start < scheduler.table.prefill_end[row]:
            assert held <= 2 * windows.span + 1, "pages behind a window are held"


def nodes_of(cache: RadixCache) -> list[RadixNode]:
    """All nodes of the tree except for its root."""
    nodes, stack = [], list(cache._root.children.values())
    while stack:
        nodes.append(stack.pop())
        stack.extend(nodes[-1].children.values())
    return nodes


def check_batches(scheduler: Scheduler) -> None:
    """Each batch in flight has the sampling parameters of its own requests."""
    table = scheduler.table
    for step in scheduler._in_flight:
        reqs = [table.reqs[row] for row in step.batch.rows]
        present = [index for index, req in enumerate(reqs) if req is not None]
        for column in table._columns:
            expected = [column.read(req.sampling) for req in reqs if req is not None]
            found = step.batch.sampling[column.name][present]
            wrong = f"the {column.name} of another request"
            assert np.array_equal(found, np.array(expected, column.dtype)), wrong


def check_table(table: RequestTable) -> None:
    """Each row is free, fenced, or owned by one request."""
    check_pool(table.rows)
    owned = [row for row, req in enumerate(table.reqs) if req is not None]
    assert owned == np.flatnonzero(table.rows.allocated).tolist(), "a row is lost or owned twice"
    assert all(req is None or req.row == row for row, req in enumerate(table.reqs))


def check_pool(pool: FencedPool) -> None:
    """Each id is in exactly one place: free, in quarantine, or allocated (I2)."""
    quarantined = [ids for group in pool._quarantine.values() for ids in group]
    held = np.concatenate([pool._stack[: pool.num_free], *quarantined])
    assert np.bincount(held, minlength=1).max() <= 1, "an id is free twice"
    assert len(held) == pool.num_free + pool.num_quarantined
    assert not pool.allocated[held].any(), "an allocated id is free"
    assert len(held) + int(pool.allocated.sum()) == pool.size, "an id is lost"


def check_cache(cache: RadixCache) -> int:
    """The invariants hold for the whole tree. Returns the number of its pages."""
    evictable = locked = reused = fenced = 0
    owned: dict[str, set[RadixNode]] = {}
    heaps = enumerate(cache.leaves.heaps)
    entries = {(kept_as, number): node for kept_as, heap in heaps for _, _, number, node in heap}
    stack = list(cache._root.children.values())
    while stack:
        node = stack.pop()
        parent = node.parent
        assert len(node.pages)
        assert len(node.tokens) == len(node.pages) * cache._page_size
        assert parent is not None
        assert parent is cache._root or parent.lock_count >= node.lock_count, (
            "a node is locked but its parent is not"
        )
        is_fenced = not node.lock_count and node.fence > cache._steps.resolved
        assert is_fenced == (node in cache._fenced), "a fence is not recorded"
        assert parent is cache._root or parent.fence >= node.fence
        fenced += len(node.pages) * is_fenced
        leaf = not any(child.on_gpu for child in node.children.values())
        waits = node.lock_count or is_fenced or not (leaf and node.on_gpu)
        assert waits or node.entry, "a leaf cannot be evicted"
        if node.entry:
            entries = [each for each in cache.leaves.heaps[_heap_of(node)] if each[3] is node]
            assert node.entry in [entry for _, _, entry, _ in entries], (
                "an entry is not in its heap"
            )
        if node.session and node.kept_as is not NodeClass.ENDED:
            owned.setdefault(node.session, set()).add(node)
        if node.place is Place.HOST:
            assert (node.pages == -1).all()
        elif node.lock_count:
            locked += len(node.pages)
        else:
            evictable += len(node.pages)
            reused += len(node.pages) * node.reused
        stack.extend(node.children.values())
    assert (evictable, reused) == (cache.evictable_pages, cache._reused_pages)
    assert fenced == cache.fenced_pages
    assert owned == {key: {*nodes} for key, nodes in cache._sessions._nodes.items()}
    if cache.tier is not None:
        check_tier(cache, cache.tier)
    return evictable + locked


def check_tier(cache: RadixCache, tier: HostTier) -> None:
    """H1, H2 and H5 of HostTier hold."""
    nodes = nodes_of(cache)
    for node in nodes:
        parent, children = node.parent, node.children.values()
        assert parent is not None
        assert parent is cache._root or parent.on_gpu or not node.on_gpu, "H1: a parent is missing"
        assert (node.blocks is None) == (node.place is Place.GPU)
        assert (node.job is None) == (node.place not in (Place.COPYING, Place.LOADING))
        assert node.job is None or (node.lock_count and node in node.job.nodes), "H2: no lock"
        if node.place is Place.BOTH:
            assert not node.lock_count
            assert all(child.place in (Place.BOTH, Place.HOST) for child in children), "H5"
        if node.place is Place.HOST and not node.children:
            assert node.entry, "the host tier cannot evict a leaf"
    check_pool(tier.blocks)
    blocks = [node.blocks for node in nodes if node.blocks is not None]
    blocks += [
        of_part for kind, node in product(cache.kinds, nodes) for _, of_part in kind.copied(node)
    ]
    closed = np.arange(tier.num_open, tier.copier.num_blocks)
    owned = np.concatenate([closed, *blocks])
    assert sorted(owned.tolist()) == np.flatnonzero(tier.blocks.allocated).tolist(), "H2"
    clean = sum(len(node.pages) for node in nodes if node.place is Place.BOTH)
    assert clean == tier.clean_pages


def check_host_slots(cache: RadixCache, engine: FakeEngine) -> None:
    """Each page of each place holds the slots of its tokens, except for those that a job writes."""
    assert engine.copier is not None
    stack = [(node, 0) for node in cache._root.children.values()]
    while stack:
        node, first = stack.pop()
        expected = slot_values(node.tokens, first).reshape(-1, engine.page_size)
        if node.on_gpu:
            assert (engine.copier.pages[node.pages] == expected).all(), "a page has other tokens"
        if node.blocks is not None and node.place is not Place.COPYING:
            assert (engine.copier.blocks[node.blocks] == expected).all(), "a block has other tokens"
        stack.extend((child, first + len(node.tokens)) for child in node.children.values())


def check_snapshots(memory: Memory, engine: FakeEngine) -> None:
    """Each snapshot of the tree holds the state of its tokens. No step runs."""
    for states in states_of(memory):
        pending = [snapshot for _, snapshot in states._saves]
        nodes = nodes_of(memory.tree)
        cached = (s for node in nodes if (s := states.snapshots.at(node)) and s not in pending)
        for snapshot in cached:
            assert snapshot.node is not None
            slots = engine.slots.reshape(-1, engine.page_size)[snapshot.pages]
            if snapshot.blocks is not None and snapshot.node.place is not Place.COPYING:
                assert engine.copier is not None
                slots = engine.copier.blocks[snapshot.blocks]
            total, tokens = decoded(slots)
            path = [node.tokens for node in snapshot.node.path()][::-1]
            values = slot_values(np.concatenate(path), 0)
            assert tokens == snapshot.tokens == len(values), "a snapshot of the wrong position"
            assert total == values.sum(dtype=np.uint64), "a snapshot holds other tokens"


def check_cached_slots(cache: RadixCache, engine: FakeEngine) -> None:
    """Each cached page holds the slots of the tokens under which it is cached. No step runs."""
    stack = [(node, 0) for node in cache._root.children.values()]
    while stack:
        node, first = stack.pop()
        pages = node.pages[:, None] * engine.page_size + np.arange(engine.page_size)
        cached = engine.slots[pages.ravel()]
        assert (cached == slot_values(node.tokens, first)).all(), (
            "a page is cached for other tokens"
        )
        stack.extend((child, first + len(node.tokens)) for child in node.children.values())
