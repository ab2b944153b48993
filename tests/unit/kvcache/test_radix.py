"""The radix cache against a dictionary of all cached prefixes, and its invariants."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from minisgl.core import InvariantBroken
from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps
from minisgl.kvcache.node import RadixNode
from minisgl.kvcache.radix import RadixCache
from tests.examples import examples
from tests.unit.scheduler.integrity import check_cache


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def fill(cache: RadixCache, tokens: np.ndarray, first_page: int, page_size: int) -> RadixNode:
    pages = np.arange(first_page, first_page + len(tokens) // page_size, dtype=np.int32)
    return cache.insert(tokens, pages)


def matched(cache: RadixCache, tokens: Int32Array, salt: str = "") -> list[int]:
    """The pages of the cached prefix of these tokens."""
    pages: list[int] = cache.match(tokens, salt).node.prefix_pages().tolist()
    return pages


def test_match_counts_whole_pages_only() -> None:
    cache = RadixCache(4, Steps())
    fill(cache, ids(1, 2, 3, 4, 5, 6, 7, 8), 0, 4)
    assert matched(cache, ids(1, 2, 3, 4, 5, 6, 7)) == [0]
    assert matched(cache, ids(1, 2, 3, 4, 5, 6, 7, 8, 9)) == [0, 1]
    assert matched(cache, ids(1, 2, 3, 9)) == []


def test_insert_of_a_known_key_keeps_the_first_pages() -> None:
    cache = RadixCache(2, Steps())
    fill(cache, ids(1, 2, 3, 4), 0, 2)
    again = cache.insert(ids(1, 2, 3, 4, 5, 6), ids(7, 8, 9))
    assert again.prefix_pages().tolist() == [0, 1, 9]
    assert cache.evictable_pages == 3


def test_a_locked_prefix_survives_any_eviction() -> None:
    cache = RadixCache(1, Steps())
    fill(cache, ids(1, 2, 3), 0, 1)
    handle = cache.match(ids(1, 2)).node
    cache.lock(handle)
    freed = [page for evicted in cache.evict(100) for page in evicted.pages.tolist()]
    assert freed == [2]
    assert matched(cache, ids(1, 2, 3)) == [0, 1]
    check_cache(cache)


def test_a_match_in_the_middle_of_an_edge_makes_its_head_recent() -> None:
    """The head of a split edge kept its last_use, so shared prefixes were evicted first."""
    cache = RadixCache(1, Steps())
    fill(cache, ids(1, 2, 3, 4), 0, 1)
    fill(cache, ids(9, 8), 10, 1)
    cache.match(ids(1, 2))  # splits: 1 2 | 3 4
    first = [page for evicted in cache.evict(2) for page in evicted.pages.tolist()]
    assert sorted(first) == [2, 3], "the tail without a match goes first"
    second = [page for evicted in cache.evict(2) for page in evicted.pages.tolist()]
    assert sorted(second) == [10, 11], "then the other key, which was used before the head"


def test_a_reused_prefix_outlives_new_ones() -> None:
    cache = RadixCache(1, Steps())
    fill(cache, ids(1, 2), 0, 1)
    cache.match(ids(1, 2, 3))
    for key in range(10, 16):
        fill(cache, ids(key), key, 1)
    evicted = [page for each in cache.evict(4) for page in each.pages.tolist()]
    assert evicted == [10, 11, 12, 13], "the oldest new leaves, and no reused one"
    assert matched(cache, ids(1, 2)) == [0, 1]
    check_cache(cache)


def test_reused_leaves_keep_at_most_half_of_the_cache() -> None:
    cache = RadixCache(1, Steps())
    for key in range(6):
        fill(cache, ids(key), key, 1)
        cache.match(ids(key))
    for key in range(6, 10):
        fill(cache, ids(key), key, 1)
    evicted = [page for each in cache.evict(4) for page in each.pages.tolist()]
    # Reused pages of all pages: 6 of 10, 5 of 9 and 4 of 7 are more than half; 4 of 8 are not.
    assert evicted == [0, 1, 6, 2]
    check_cache(cache)


def test_a_locked_prefix_does_not_count_in_the_reused_half() -> None:
    """Regression: a large locked prefix, which cannot be evicted, filled the reused half."""
    cache = RadixCache(1, Steps())
    fill(cache, ids(*range(20)), 0, 1)
    fill(cache, ids(100), 100, 1)
    cache.match(ids(100))
    in_use = cache.match(ids(*range(20))).node
    for key in range(200, 203):
        fill(cache, ids(key), key, 1)
    cache.lock(in_use)
    check_cache(cache)
    assert [page for each in cache.evict(2) for page in each.pages.tolist()] == [200, 201]
    cache.unlock(in_use, 0)
    check_cache(cache)
    assert [page for each in cache.evict(1) for page in each.pages.tolist()] == [100]


KEYS = st.integers(0, 7)
ACTS = st.tuples(st.sampled_from(["insert", "match", "match", "evict"]), KEYS)


@settings(max_examples=examples(300))
@given(st.lists(ACTS, max_size=60))
def test_each_class_evicts_its_least_recently_used_leaf(acts: list[tuple[str, int]]) -> None:
    """Regression: reused leaves were evicted in the order of insertion and not of last use."""
    cache = RadixCache(1, Steps())
    new: dict[int, None] = {}  # both in the order of their last use
    reused: dict[int, None] = {}
    for act, key in acts:
        if act == "evict":
            kind = reused if reused and (len(reused) > len(new) or not new) else new
            expected = [next(iter(kind))] if kind else []
            evicted = [page for each in cache.evict(1) for page in each.pages.tolist()]
            assert evicted == expected
            for page in evicted:
                del kind[page]
        elif act == "match":
            if cache.match(ids(key)).pages:
                new.pop(key, None)
                reused.pop(key, None)
                reused[key] = None
        else:
            cache.insert(ids(key), ids(key))
            kind = reused if key in reused else new
            kind.pop(key, None)
            kind[key] = None
        check_cache(cache)


def test_void_entries_of_reused_leaves_do_not_accumulate() -> None:
    """If every prompt is matched again, evictions never remove the void entries of heap 0."""
    cache = RadixCache(1, Steps())
    fill(cache, ids(10_000), 10_000, 1)
    for key in range(1000):
        fill(cache, ids(key), key, 1)
        cache.match(ids(key))
        if key >= 10:
            cache.evict(1)
    assert cache.evictable_pages == 11
    assert sum(map(len, cache.leaves.heaps)) <= 2 * 11


def test_eviction_skips_a_prefix_that_a_step_in_flight_reads() -> None:
    cache = RadixCache(1, Steps())
    handle = fill(cache, ids(1, 2, 3, 4), 0, 1)
    fill(cache, ids(9), 9, 1)
    cache.lock(handle)
    cache.unlock(handle, fence=17)
    assert (cache.evictable_pages, cache.fenced_pages) == (5, 4)
    assert [evicted.pages.tolist() for evicted in cache.evict(5)] == [[9]]
    cache._steps.resolved = 16
    cache.resolve()
    assert not cache.evict(1)
    cache._steps.resolved = 17
    cache.resolve()
    assert cache.fenced_pages == 0
    (evicted,) = cache.evict(1)
    assert (evicted.pages.tolist(), evicted.fence) == ([3], 17)
    assert matched(cache, ids(1, 2, 3, 4)) == [0, 1, 2]


def test_lifted_fences_let_eviction_take_all_unlocked_pages() -> None:
    cache = RadixCache(1, Steps())
    handle = fill(cache, ids(1, 2), 0, 1)
    cache.lock(handle)
    cache.unlock(handle, fence=3)
    cache.lift_fences()
    assert [(each.pages.tolist(), each.fence) for each in cache.evict(2)] == [([0, 1], 3)]


def test_an_eviction_visits_few_nodes_of_a_large_tree() -> None:
    """Each eviction walked the whole tree and sorted its leaves."""
    cache = RadixCache(1, Steps())
    for key in range(3000):
        fill(cache, ids(key % 50, key), 2 * key, 1)
    visited = 0
    cut = cache._cut

    def counting(node: object, count: int) -> np.ndarray:
        nonlocal visited
        visited += 1
        return cut(node, count)  # type: ignore[arg-type]

    cache._cut = counting  # type: ignore[method-assign]
    before = sum(map(len, cache.leaves.heaps))
    cache.evict(1)
    assert visited == 1
    assert before - sum(map(len, cache.leaves.heaps)) <= 1, (
        "one entry was removed from the heap, not all"
    )


def test_unlocking_too_often_is_a_bug() -> None:
    cache = RadixCache(1, Steps())
    handle = fill(cache, ids(1), 0, 1)
    with pytest.raises(InvariantBroken, match="more often"):
        cache.unlock(handle, 0)


SESSIONS = st.sampled_from(["", "a", "a", "b"])


class RadixMachine(RuleBasedStateMachine):
    """Model: a map from each cached prefix (whole pages) to its last page."""

    handles = Bundle("handles")

    @initialize(page_size=st.sampled_from([1, 2, 4]))
    def start(self, page_size: int) -> None:
        self.page_size = page_size
        self.cache = RadixCache(page_size, Steps())
        self.model: dict[tuple[int, ...], int] = {}
        self.fences: dict[tuple[int, ...], int] = {}
        self.next_page = self.resolved = 0
        self.locks: list[tuple[RadixNode, tuple[int, ...]]] = []
        self.users: dict[tuple[int, ...], set[str]] = {}  # sessions of the requests that used it
        self.ended: set[tuple[int, ...]] = set()

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        cuts = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:cut]) for cut in cuts]

    @rule(tokens=st.lists(st.integers(0, 2), max_size=14), session=SESSIONS)
    def insert(self, tokens: list[int], session: str) -> None:
        keys = self.prefixes(tokens)
        new = np.arange(self.next_page, self.next_page + len(keys), dtype=np.int32)
        self.next_page += len(keys)
        whole = np.array(tokens[: len(keys) * self.page_size], dtype=np.int32)
        result = self.cache.insert(whole, new, session=session)
        self.use([key for key in keys if key in self.model], session)
        for before, key, page in zip([(), *keys], keys, new.tolist(), strict=False):
            if key not in self.model:
                self.model[key], self.users[key] = page, {session}
                self.ended |= {key} if before in self.ended else set()
        assert result.prefix_pages().tolist() == [self.model[key] for key in keys]

    def use(self, keys: list[tuple[int, ...]], session: str) -> None:
        """A request of a session uses these cached prefixes."""
        for key in keys:
            self.users[key].add(session)
        self.ended -= {key for key in keys if len(self.users[key]) > 1}

    @rule(session=st.sampled_from(["a", "b"]))
    def end_session(self, session: str) -> None:
        own = {key for key in self.model if self.users[key] == {session}}
        assert self.cache.end_session(session) == len(own - self.ended)
        assert not self.cache.end_session(session), "the second end moves nothing"
        self.ended |= own

    @rule(tokens=st.lists(st.integers(0, 2), max_size=14), lock=st.booleans(), session=SESSIONS)
    def match(self, tokens: list[int], lock: bool, session: str) -> None:
        expected = []
        for key in self.prefixes(tokens):
            if key not in self.model:
                break
            expected.append(self.model[key])
        found = self.prefixes(tokens)[: len(expected)]
        self.use(found, session)
        self.ended -= {*found}
        match = self.cache.match(np.array(tokens, dtype=np.int32), session=session)
        assert match.node.prefix_pages().tolist() == expected
        if lock and expected:
            self.cache.lock(match.node)
            self.locks.append((match.node, tuple(tokens[: len(expected) * self.page_size])))

    @rule(data=st.data(), fence=st.integers(0, 9))
    def unlock(self, data: st.DataObject, fence: int) -> None:
        """fence: steps after the newest completed one."""
        if self.locks:
            index = data.draw(st.integers(0, len(self.locks) - 1))
            handle, key = self.locks.pop(index)
            self.cache.unlock(handle, self.resolved + fence)
            for prefix in self.prefixes(list(key)):
                before = self.fences.get(prefix, 0)
                self.fences[prefix] = max(before, self.resolved + fence)

    @rule(steps=st.integers(1, 5))
    def resolve(self, steps: int) -> None:
        self.resolved += steps
        self.cache._steps.resolved = self.resolved
        self.cache.resolve()

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        before = self.cache.evictable_pages - self.cache.fenced_pages
        evicted = self.cache.evict(count)
        gone = {page for each in evicted for page in each.pages.tolist()}
        assert len(gone) == min(count, before)
        assert all(each.fence <= self.resolved for each in evicted)
        keys = [key for key, page in self.model.items() if page in gone]
        if not self.ended.issuperset(keys):
            held = {key for _, locked in self.locks for key in self.prefixes(list(locked))}
            held |= {key for key, fence in self.fences.items() if fence > self.resolved}
            assert held.issuperset(self.ended - {*keys}), "an ended page stayed in place of others"
        self.ended -= {*keys}
        for key in keys:
            assert self.fences.pop(key, 0) <= self.resolved, "a step in flight reads the page"
        self.model = {key: page for key, page in self.model.items() if page not in gone}
        for _, locked in self.locks:
            for key in self.prefixes(list(locked)):
                assert key in self.model, "a locked page was evicted"

    @invariant()
    def counters_agree(self) -> None:
        if hasattr(self, "cache"):
            assert check_cache(self.cache) == len(self.model)


TestRadixMachine = RadixMachine.TestCase
TestRadixMachine.settings = settings(max_examples=examples(150), stateful_step_count=30)


def test_keys_with_different_salts_share_nothing() -> None:
    cache = RadixCache(2, Steps())
    key = ids(1, 2, 3, 4)
    for first_page, salt in enumerate(["", "a", "ab"]):
        assert not cache.match(key, salt).pages
        cache.insert(key, ids(2 * first_page, 2 * first_page + 1), salt)
    assert matched(cache, ids(1, 2, 9, 9), "a") == [2]  # splits below the root
    assert matched(cache, key, "a") == [2, 3]
    assert matched(cache, key, "ab") == [4, 5]
    assert matched(cache, key) == [0, 1]
    check_cache(cache)
    assert sum(len(evicted.pages) for evicted in cache.evict(6)) == 6
    assert not cache.match(key, "a").pages
    check_cache(cache)
