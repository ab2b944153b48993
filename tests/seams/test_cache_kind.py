"""A program adds a kind of memory without changing the package.

The toy kind has few slots, one for each running request. Its hits end at even pages, and its chunks
at page ends, as those of recurrent states do.
"""

import numpy as np

from minisgl.core import SchedulerConfig
from minisgl.core.batch import EngineLike, Int32Array
from minisgl.core.rows import Rows
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.kinds import CacheKind, KindRoom, NodeParts, Wanted
from minisgl.kvcache.memory import Memory
from minisgl.kvcache.node import Hit, RadixNode
from tests.unit.scheduler.fake_engine import FakeEngine, expected_output
from tests.unit.scheduler.harness import Harness
from tests.unit.scheduler.integrity import check_pool, nodes_of
from tests.unit.scheduler.test_scheduler import prompt_of

SLOTS, PAGE = 2, 4


class Slots(CacheKind, NodeParts):
    """The part of a node is its number of pages."""

    name = "slots"

    def __init__(self, engine: EngineLike, rows: Rows, memory: Memory, index: int) -> None:
        self.rows, self.index, self.page_size = rows, index, engine.page_size
        self.totals: dict[str, int] = {}
        self.parts = self
        self.pool = FencedPool(SLOTS, rows.steps)
        self.slots: dict[int, Int32Array] = {}

    def room(self) -> "SlotRoom":
        return SlotRoom(self)

    def usable(self, end: RadixNode, pages: int) -> int:
        return pages - pages % 2

    def usage(self) -> tuple[int, int, int]:
        return len(self.slots), 0, SLOTS - len(self.slots)

    def lock(self, hit: Hit) -> None:
        assert hit.pages % 2 == 0

    def open(self, row: int, hit: Hit) -> None:
        self.slots[row] = self.pool.allocate(1)

    def grow(self, rows: Int32Array, tokens: Int32Array) -> None:
        ends = self.rows.computed[rows] + tokens
        assert ((ends % self.page_size == 0) | (ends >= self.rows.prefill_end[rows])).all()

    def publish(self, row: int, node: RadixNode, pages: int) -> None:
        assert sum(each.parts[self.index] for each in node.path()) == pages

    def close(self, row: int) -> None:
        self.pool.release(self.slots.pop(row), int(self.rows.last_step[row]))

    def part(self, pages: int) -> int:
        return pages

    def split(self, upper: RadixNode, lower: RadixNode, pages: int) -> None:
        upper.parts[self.index] = pages
        lower.parts[self.index] -= pages

    def drop(self, node: RadixNode, kept: int) -> int:
        node.parts[self.index] = kept
        return 0


class SlotRoom(KindRoom):
    def __init__(self, slots: Slots) -> None:
        self.slots, self.left = slots, slots.pool.num_free
        self.ends: dict[int, int] = {}

    def fits(self, wanted: Wanted, hit: Hit) -> bool:
        return self.left > 0

    def open(self, row: int, wanted: Wanted, hit: Hit) -> None:
        self.left -= 1
        self.ends[row] = len(wanted.tokens)

    def cut(self, row: int, start: int, tokens: int) -> int:
        prompt_end = self.ends.get(row) or int(self.slots.rows.prefill_end[row])
        end = start + tokens
        return tokens if end == prompt_end else max(end - end % PAGE - start, 0)


def test_a_program_adds_a_kind_of_memory() -> None:
    config = SchedulerConfig(prefill_budget_tokens=10, target_step_ms=None)
    harness = Harness(FakeEngine(40, PAGE, 8, 64), config, kinds=(Slots,))
    shared = prompt_of(30)
    prompts = [shared, prompt_of(11, 3), [*shared[:22], 9, 9, 9], prompt_of(25, 5), shared]
    for _ in range(2):
        uids = [harness.add(prompt, max_tokens=6, ignore_eos=True) for prompt in prompts]
        harness.run()
        for uid, prompt in zip(uids, prompts, strict=True):
            answer = harness.answers[uid]
            assert answer.tokens == expected_output(prompt, 6, ignore_eos=True)
            assert answer.cached_tokens % (2 * PAGE) == 0, "a hit ends at an even page"
    assert harness.answers[uids[0]].cached_tokens == 24
    assert max(len(batch.rows) for batch in harness.engine.batches) == SLOTS
    (kind,) = harness.scheduler.memory.kinds
    assert isinstance(kind, Slots)
    check_pool(kind.pool)
    assert harness.scheduler.stats().kind_pages["slots"] == (0, 0, SLOTS)
    for node in nodes_of(harness.scheduler.memory.tree):
        assert node.parts == [len(node.pages)]


def test_a_full_cache_evicts_the_parts_with_their_pages() -> None:
    harness = Harness(FakeEngine(10, PAGE, 8, 40), kinds=(Slots,))
    for first in range(6):
        uid = harness.add(prompt_of(20, first), max_tokens=5, ignore_eos=True)
        harness.run()
        assert harness.answers[uid].tokens == expected_output(prompt_of(20, first), 5, True)
    assert harness.scheduler.memory.evicted_pages_total > 0
    for node in nodes_of(harness.scheduler.memory.tree):
        assert node.parts == [len(node.pages)]
    assert np.all(harness.scheduler.memory.table.counts >= 0)
