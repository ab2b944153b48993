"""Window pages: their users, their place in the prefix cache, and the hits that they allow."""

import numpy as np
import pytest

from minisgl.core.batch import Int32Array, WindowLayers
from minisgl.core.rows import Rows, Steps
from minisgl.kvcache.memory import Memory
from minisgl.kvcache.node import RadixNode
from minisgl.kvcache.radix import RadixCache
from minisgl.kvcache.window import Windows
from minisgl.kvcache.window_pages import ABSENT, WindowPages
from tests.unit.scheduler.fake_engine import FakeEngine

SPAN = 2


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def new_cache(num_pages: int = 32) -> tuple[RadixCache, WindowPages]:
    """A cache with pages of one token, in which a hit needs the last two window pages."""
    engine = FakeEngine(64, 1, window=WindowLayers(SPAN + 1, num_pages))
    memory = Memory(engine, Rows(8, 64))
    (windows,) = memory.kinds
    assert isinstance(windows, Windows)
    return memory.tree, windows.pages


def insert(cache: RadixCache, pages: WindowPages, tokens: Int32Array, first: int) -> Int32Array:
    """Insert `tokens` with window pages from page `first` on, as a request that has ended."""
    windows = np.full(len(tokens), ABSENT, dtype=np.int32)
    windows[first:] = pages.allocate(len(tokens) - first)
    pages.fill(cache.insert(tokens, tokens), windows)
    pages.leave(windows[first:], 0)
    return windows


def usable_of(pages: WindowPages, windows: Int32Array) -> int:
    """The usable pages of a path of one node with these window pages."""
    root = RadixNode(ids(), ids(), [], None, b"", last_use=0, node_id=0)
    node = RadixNode(windows, windows, [windows], root, b"", last_use=0, node_id=1)
    return pages.usable(node, len(windows))


def windows_at_end(cache: RadixCache, pages: WindowPages, tokens: Int32Array) -> list[int]:
    match = cache.match(tokens)
    return pages.at_end(match.node, match.pages).tolist()


@pytest.mark.parametrize(
    ("present", "usable"),
    [
        ([], 0),
        ([1], 1),
        ([1, 1, 1], 3),
        ([0, 1, 1], 3),
        ([1, 0, 1], 1),
        ([0, 0, 1], 0),
        ([0, 1, 1, 0, 1], 3),
        ([1, 1, 0, 1, 1], 5),
    ],
)
def test_a_hit_ends_after_a_complete_window(present: list[int], usable: int) -> None:
    _, pages = new_cache()
    windows = np.where(np.array(present, dtype=bool), 7, ABSENT).astype(np.int32)
    assert usable_of(pages, windows) == usable


def test_a_window_of_one_token_needs_no_earlier_page() -> None:
    assert usable_of(WindowPages(1, 0, Steps()), ids(ABSENT, ABSENT)) == 2


def test_a_match_tells_the_usable_and_the_known_pages() -> None:
    cache, pages = new_cache()
    windows = insert(cache, pages, ids(1, 2, 3, 4, 5, 6), first=4)
    whole = cache.match(ids(1, 2, 3, 4, 5, 6, 7))
    assert whole.node.prefix_pages().tolist() == [1, 2, 3, 4, 5, 6]
    assert pages.at_end(whole.node, 6).tolist() == windows.tolist()
    branch = cache.match(ids(1, 2, 3, 4, 9))
    assert (branch.pages, branch.known_pages) == (0, 4)


def test_an_insertion_adds_windows_that_were_absent_and_keeps_the_others() -> None:
    cache, pages = new_cache()
    first = insert(cache, pages, ids(1, 2, 3, 4), first=2)
    second = insert(cache, pages, ids(1, 2, 3, 4), first=0)
    assert windows_at_end(cache, pages, ids(1, 2, 3, 4)) == [*second[:2], *first[2:]]
    free = pages.pool.size - pages.pool.num_free
    assert free == 4, "the two window pages that the cache had already are free again"


def test_eviction_takes_the_least_recently_used_window_that_no_request_uses() -> None:
    cache, pages = new_cache(num_pages=6)
    old, used, recent = (insert(cache, pages, ids(key, key + 1), 0) for key in (10, 20, 30))
    pages.use(used)
    cache.match(ids(10, 11))
    pages.reclaim(2)
    assert not pages.cached[recent].any(), "the first window was matched, the second is used"
    pages.reclaim(3)
    assert pages.cached.nonzero()[0].tolist() == sorted(used)
    assert pages.pool.num_free == 4
    assert cache.match(ids(10, 11)).pages == 0
    assert cache.evictable_pages == 6, "the prefixes stay cached"
    pages.leave(used, fence=0)
    pages.reclaim(9)
    assert pages.pool.num_free == 6
    assert old is not None


def test_eviction_skips_a_window_that_a_step_in_flight_reads() -> None:
    cache, pages = new_cache(num_pages=4)
    read, idle = (insert(cache, pages, ids(key, key + 1), 0) for key in (10, 20))
    pages.use(read)
    pages.leave(read, fence=5)
    assert pages.available == 2
    pages.reclaim(4)
    assert (pages.pool.num_free, pages.pool.num_quarantined) == (2, 0)
    assert pages.cached[read].all()
    assert not pages.cached[idle].any()
    pages.pool.steps.resolved = 5
    pages.pool.resolve()
    assert pages.available == 4
    pages.reclaim(4)
    assert pages.pool.num_free == 4


def test_a_released_page_waits_for_the_last_step_of_all_its_users() -> None:
    pages = WindowPages(1, SPAN, Steps())
    page = pages.allocate(1)
    pages.use(page)
    pages.cached[page] = True
    pages.leave(page, fence=5)
    pages.leave(page, fence=3)
    pages.remove(page)
    assert (pages.pool.num_free, pages.pool.num_quarantined) == (0, 1)
    pages.pool.steps.resolved = 4
    pages.pool.resolve()
    assert pages.pool.num_free == 0
    pages.pool.steps.resolved = 5
    pages.pool.resolve()
    assert pages.pool.num_free == 1


def test_evicted_prefixes_leave_no_entries_behind() -> None:
    """Regression: evicted nodes kept their entries until a window was evicted."""
    cache, pages = new_cache(num_pages=2)
    for key in range(100):
        insert(cache, pages, ids(key), 0)
        cache.evict(1)
    assert len(pages._lru) <= 2
    assert pages.pool.num_free == 2
