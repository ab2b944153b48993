"""The index that a subscriber keeps from the events equals the content of the prefix cache."""

import random
import subprocess
import sys

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from minisgl.core import ConfigError
from minisgl.core.rows import Steps
from minisgl.kv_events import CacheEvents
from minisgl.kv_events.messages import AllBlocksCleared, BlockStored, KVEvent
from minisgl.kvcache.radix import RadixCache
from minisgl.message.stats import KVEventTotals
from tests.examples import examples
from tests.unit.kv_events.machine import Replica, random_operation

HASHES = """
import numpy as np
from minisgl.kv_events import CacheEvents
from minisgl.message.stats import KVEventTotals
batches = []
events = CacheEvents(4, "model", lambda batch: batches.append(batch) or True, KVEventTotals(), 2, 9)
for salt in ("", "salt"):
    first = 4 * bool(salt)
    events.stored(np.arange(8, dtype=np.int32), np.arange(first, first + 4, dtype=np.int32), salt)
events.flush()
print([one.block_hashes for one in batches[0]])
"""


class EventsMachine(RuleBasedStateMachine):
    """Random insertions, evictions and full queues."""

    @initialize(page_size=st.sampled_from([1, 2, 4]), num_pages=st.integers(4, 40))
    def start(self, page_size: int, num_pages: int) -> None:
        self.replica = Replica(page_size, num_pages)
        self.prompts: list[list[int]] = []
        self.dropped = False

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 10))
    def operate(self, seed: int, count: int) -> None:
        draw = random.Random(seed)
        for _ in range(count):
            random_operation(self.replica, draw, self.prompts)

    @rule(full=st.booleans())
    def fill_the_queue(self, full: bool) -> None:
        self.replica.full = full

    @invariant()
    def the_index_equals_the_cache(self) -> None:
        if not hasattr(self, "replica"):
            return
        replica = self.replica
        replica.events.flush()
        self.dropped = self.dropped or replica.full or replica.events.totals.dropped > 0
        if not replica.full:
            replica.check(complete=not self.dropped)


class TestEventsMachine(EventsMachine.TestCase):
    settings = settings(max_examples=examples(60), stateful_step_count=25)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize(
    "operations",
    [3_000, pytest.param(100_000, marks=[pytest.mark.proof])],
)
def test_the_index_equals_the_cache_after_many_operations(page_size: int, operations: int) -> None:
    replica, draw, prompts = Replica(page_size, 120 // page_size), random.Random(page_size), []
    for step in range(operations):
        random_operation(replica, draw, prompts)
        if step % 50 == 0:
            replica.check()
    replica.check()
    assert replica.events.totals.removed > operations / 4


def test_hashes_are_equal_after_a_restart_and_differ_between_salts() -> None:
    """PYTHONHASHSEED is random in each process."""
    outputs = [
        subprocess.run([sys.executable, "-c", HASHES], capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    first, second = [output.stdout for output in outputs]
    assert first == second
    plain, salted = first.strip()[2:-2].split("], [")
    assert not {*plain.split(", ")} & {*salted.split(", ")}


def test_a_block_of_several_pages_is_announced_with_its_last_page() -> None:
    batches: list[list[KVEvent]] = []
    events = CacheEvents(
        8, "model", lambda batch: batches.append(batch) or True, KVEventTotals(), 2, 9
    )
    cache = RadixCache(2, Steps(), [events])
    tokens = np.arange(18, dtype=np.int32)
    cache.insert(tokens[:6], np.arange(3, dtype=np.int32))
    events.flush()
    assert batches == []
    cache.insert(tokens, np.arange(9, dtype=np.int32))
    events.flush()
    (stored,) = batches[0]
    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [*range(16)]
    assert stored.parent_block_hash is None
    cache.evict(2)
    events.flush()
    (removed,) = batches[1]
    assert removed.block_hashes == stored.block_hashes[1:]


def test_after_a_full_queue_blocks_are_cleared_and_announced_at_their_next_use() -> None:
    replica = Replica(2, 20)
    replica.insert([1] * 8, "")
    replica.events.flush()
    replica.full = True
    replica.insert([2] * 8, "")
    replica.events.flush()
    replica.full = False
    replica.events.flush()
    assert (replica.index.blocks, replica.events.totals.dropped) == (0, 1)
    replica.insert([1] * 8, "")
    replica.events.flush()
    replica.check(complete=False)
    assert replica.index.match(np.full(8, 1, dtype=np.int32), 4) == 8


def test_a_block_size_that_pages_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of the page size 16"):
        CacheEvents(24, "model", lambda _: True, KVEventTotals(), 16, 9)


def test_a_cleared_stream_begins_with_all_blocks_cleared() -> None:
    batches: list[list[KVEvent]] = []
    accept = [False, True]
    events = CacheEvents(
        4,
        "model",
        lambda batch: accept.pop(0) and (batches.append(batch) or True),
        KVEventTotals(),
        4,
        9,
    )
    for first in (0, 1):
        events.stored(np.full(4, first, dtype=np.int32), np.array([first]), "")
        events.flush()
    assert isinstance(batches[0][0], AllBlocksCleared)
    assert len(batches[0]) == 2
