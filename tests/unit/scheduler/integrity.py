"""Checks of the invariants of pools, prefix cache, request table and scheduler between two steps.

Each function raises AssertionError where an invariant of the class is broken. The checks walk
whole data structures, so only tests call them.
"""

import numpy as np

from minisgl.kvcache import FencedPool, RadixCache
from minisgl.scheduler import Scheduler
from minisgl.scheduler.request_table import RequestTable
from tests.unit.scheduler.fake_engine import FakeEngine, slot_values


def check_scheduler(scheduler: Scheduler) -> None:
    """Each page, each row and each request has exactly one owner."""
    manager, table = scheduler.kv_manager, scheduler.table
    pool, cache = manager.pool, manager.cache
    check_pool(pool)
    cached = check_cache(cache)
    check_table(table)
    running = [req for req in table.reqs if req is not None]
    own = [table.pages.of_row(req.row)[req.shared_pages :] for req in running]
    owned = np.concatenate([np.empty(0, dtype=np.int32), *own])
    assert len(np.unique(owned)) == len(owned), "two requests own the same page"
    total = pool.num_free + pool.num_quarantined + cached + len(owned)
    assert total == pool.size, (
        f"free {pool.num_free} + quarantined {pool.num_quarantined} + cached {cached} + running "
        f"{len(owned)} != {pool.size} pages"
    )
    if scheduler.idle:
        assert cached == cache.evictable_pages, "idle, but pages are locked"


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
    assert len(np.unique(held)) == len(held), "an id is free twice"
    assert len(held) == pool.num_free + pool.num_quarantined
    assert not pool.allocated[held].any(), "an allocated id is free"
    assert len(held) + int(pool.allocated.sum()) == pool.size, "an id is lost"


def check_cache(cache: RadixCache) -> int:
    """I1, I2 and I3 hold for the whole tree. Returns the number of its pages."""
    evictable = locked = reused = 0
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
        assert node.lock_count or node.children or node.in_heap, "a leaf cannot be evicted"
        if node.lock_count:
            locked += len(node.pages)
        else:
            evictable += len(node.pages)
            reused += len(node.pages) * node.reused
        stack.extend(node.children.values())
    assert (evictable, reused) == (cache.evictable_pages, cache._reused_pages)
    return evictable + locked


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
