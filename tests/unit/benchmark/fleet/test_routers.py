"""The choices of the routers in small cases, and the index of cached blocks."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from minisgl.benchmark.fleet.replica import BlockRecorder, Replica
from minisgl.benchmark.fleet.routers import (
    SCRAPE_S,
    ApproximatePicker,
    EndpointPicker,
    LeastLoad,
    PrefixIndex,
    RoundRobin,
)
from minisgl.benchmark.trace import page_chain
from minisgl.core.rows import Steps
from minisgl.kvcache.radix import RadixCache
from tests.examples import examples
from tests.unit.benchmark.fleet.builders import STILL, load_of, prompt, run
from tests.unit.benchmark.fleet.builders import settings as engine_settings


def replicas(count: int) -> list[Replica]:
    return [Replica(number, engine_settings(), observed=False) for number in range(count)]


def set_metrics(replica: Replica, waiting: int, running: int = 3, kv_usage: float = 0.0) -> None:
    replica.open_reqs = dict.fromkeys(range(waiting + running))
    replica.running, replica.kv_usage = running, kv_usage


def test_a_request_that_the_scheduler_has_not_received_is_waiting() -> None:
    """The server counts the open requests of its API. A scheduler in a long step reads nothing."""
    [replica] = replicas(1)
    set_metrics(replica, waiting=2, running=1)
    assert replica.waiting == 2
    replica.open_reqs.clear()
    assert replica.waiting == 0


def test_round_robin_takes_turns_also_when_a_replica_is_missing() -> None:
    router, ready = RoundRobin(), replicas(3)
    chosen = [router.choose(prompt(0), ready, 0.0).number for _ in range(4)]
    assert chosen == [0, 1, 2, 0]
    without = [ready[0], ready[2]]
    assert [router.choose(prompt(0), without, 0.0).number for _ in range(3)] == [2, 0, 2]


def test_least_load_counts_open_requests() -> None:
    router, ready = LeastLoad(0), replicas(3)
    ready[0].open_reqs = dict.fromkeys(range(2))
    ready[1].open_reqs = dict.fromkeys(range(1))
    ready[2].open_reqs = dict.fromkeys(range(2))
    assert router.choose(prompt(0), ready, 0.0).number == 1
    ready[1].open_reqs = dict.fromkeys(range(9))
    both = {router.choose(prompt(0), ready, 0.0).number for _ in range(50)}
    assert both == {0, 2}, "equal replicas are chosen at random"


def test_the_approximate_picker_returns_to_the_replica_of_the_prefix() -> None:
    """Every other score is equal, so the prefix decides. Another prompt may go anywhere."""
    router, ready = ApproximatePicker(0, 1000), replicas(8)
    first = router.choose(prompt(0, 640), ready, 0.0)
    longer = np.concatenate([prompt(0, 640), prompt(1, 100)])
    assert all(router.choose(longer, ready, at_s).number == first.number for at_s in (0.0, 1.0))
    others = {router.choose(prompt(seed, 640), ready, 2.0).number for seed in range(2, 60)}
    assert others == set(range(8))


def test_the_approximate_picker_counts_a_last_block_that_is_not_full() -> None:
    """A prompt of 100 tokens has two blocks of 64, as in llm-d-router."""
    router = ApproximatePicker(0, 1000)
    assert len(router._chain(prompt(0, 100))) == 2
    assert len(router._chain(prompt(0, 128))) == 2
    assert router._chain(prompt(0, 100))[0] == router._chain(prompt(0, 128))[0]
    assert len(router._chain(np.zeros(140_000, dtype=np.int32))) == 131_072 // 64


@pytest.mark.parametrize(
    ("waiting", "kv_usage", "share", "stays"),
    [
        (0, 0.0, 1.0, True),  # 2 + 2 + 3 against 2 + 2 + 0
        (5, 0.0, 1.0, True),  # 0 + 2 + 3 against 2 + 2 + 0
        (5, 0.75, 1.0, False),  # 0 + 0.5 + 3 against 2 + 2 + 0
        (5, 0.0, 0.5, False),  # 0 + 2 + 1.5 against 2 + 2 + 0
        (0, 0.8, 0.5, False),  # 2 + 0.4 + 1.5 against 2 + 2 + 0
        (0, 0.7, 0.5, True),  # 2 + 0.6 + 1.5 against 2 + 2 + 0
    ],
)
def test_the_picker_adds_the_weighted_scores(
    waiting: int, kv_usage: float, share: float, stays: bool
) -> None:
    """Replica 0 holds the first half, or all, of the prompt."""
    ready = replicas(2)
    set_metrics(ready[0], waiting, kv_usage=kv_usage)
    router = EndpointPicker(0, 16)
    chain = page_chain(prompt(0, 320), 16)
    router._index.stored(0, chain[: round(len(chain) * share)])
    assert (router.choose(prompt(0, 320), ready, 0.0).number == 0) == stays


def test_the_picker_reads_metrics_only_at_each_scrape() -> None:
    router, ready = EndpointPicker(0, 16), replicas(2)
    set_metrics(ready[0], waiting=5)
    assert router.choose(prompt(0), ready, 1.0).number == 1
    set_metrics(ready[0], waiting=0)
    set_metrics(ready[1], waiting=5)
    assert router.choose(prompt(0), ready, 1.0 + SCRAPE_S / 2).number == 1
    assert router.choose(prompt(0), ready, 1.0 + SCRAPE_S).number == 0


def test_the_precise_picker_knows_an_eviction_and_the_approximate_does_not() -> None:
    """Replica 0 answers A, then B, whose pages replace those of A. Then A comes again."""
    a, b = prompt(0, 960), prompt(1, 960)
    load = load_of((0.0, a, 1), (1.0, b, 1), (2.0, b, 1))
    index = EndpointPicker(0, 16)
    run(load, STILL, index, sizes=(64, 4))
    assert index._index.matches(page_chain(a, 16))[0] < 10
    assert index._index.matches(page_chain(b, 16))[0] == 60
    approximate = ApproximatePicker(0, 64)
    run(load, STILL, approximate, sizes=(64, 4))
    assert approximate._index.matches(approximate._chain(a))[0] == 15


def test_the_index_forgets_a_replica() -> None:
    index = PrefixIndex()
    index.stored(0, [1, 2])
    index.stored(1, [1])
    index.forget(0)
    index.forget(7)
    assert index.matches([1, 2]) == Counter({1: 1})


class IndexMachine(RuleBasedStateMachine):
    """The index against a list of blocks for each replica, the oldest block first."""

    CAPACITY = 5

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(self.CAPACITY)
        self.model: dict[int, list[int]] = {number: [] for number in range(3)}

    @rule(replica=st.integers(0, 2), blocks=st.lists(st.integers(1, 9), max_size=7, unique=True))
    def store(self, replica: int, blocks: list[int]) -> None:
        self.index.stored(replica, blocks)
        for block in blocks:
            kept = [other for other in self.model[replica] if other != block]
            self.model[replica] = [*kept, block][-self.CAPACITY :]

    @rule(replica=st.integers(0, 2), count=st.integers(0, 3))
    def remove(self, replica: int, count: int) -> None:
        blocks, self.model[replica] = self.model[replica][:count], self.model[replica][count:]
        self.index.removed(replica, blocks)

    @rule(replica=st.integers(0, 2))
    def forget(self, replica: int) -> None:
        self.index.forget(replica)
        self.model[replica] = []

    @invariant()
    def each_block_has_the_right_holders(self) -> None:
        for block in range(1, 10):
            holders = {number for number, blocks in self.model.items() if block in blocks}
            assert set(self.index.matches([block])) == holders


IndexMachine.TestCase.settings = settings(max_examples=examples(40))
TestIndex = IndexMachine.TestCase


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), max_size=6), st.integers(0, 4)),
        max_size=30,
    )
)
@settings(max_examples=examples(80))
def test_the_events_give_the_blocks_of_the_cache(steps: list[tuple[list[int], int]]) -> None:
    """Prompts of up to six pages with few different pages, so that they share prefixes.

    An index that is fed with the events matches each prompt as far as the cache does.
    """
    recorder, index = BlockRecorder(page_size=2, num_pages=400), PrefixIndex()
    cache = RadixCache(2, Steps(), [recorder])
    free = list(range(400))
    prompts = [np.repeat(np.array(words, dtype=np.int32), 2) for words, _ in steps]
    for tokens, (_, evicted) in zip(prompts, steps, strict=True):
        pages = np.array([free.pop(0) for _ in range(len(tokens) // 2)], dtype=np.int32)
        kept = cache.insert(tokens, pages).prefix_pages()
        free += [page for page in pages.tolist() if page not in kept]
        for gone in cache.evict(evicted):
            free += gone.pages.tolist()
        for stored, removed in recorder.events:
            index.removed(0, removed)
            index.stored(0, stored)
        recorder.events.clear()
        for other in prompts:
            found = index.matches(page_chain(other, 2))[0]
            assert found == cache.match(other).pages
