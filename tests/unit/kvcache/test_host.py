"""The host tier on a prefix tree whose copies end when the test says so."""

import sys
import tracemalloc
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps
from minisgl.kvcache import host
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.host import TOTALS, HostTier
from minisgl.kvcache.kinds import NodeParts
from minisgl.kvcache.node import Place, RadixNode
from minisgl.kvcache.radix import RadixCache


class NoCopier:
    """Implements core.PageCopier without bytes."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = self.num_open = num_blocks
        self.block_bytes, self.is_opening = 100, False

    def start_opening(self) -> None:
        """All blocks can be used."""

    def wait_open(self, count: int) -> None:
        """All blocks can be used."""

    def start(self, job: int, pages: Int32Array, blocks: Int32Array, load: bool) -> None:
        assert len(pages) == len(blocks) == len({*blocks.tolist()})

    def done(self, wait_s: float) -> list[int]:
        return []

    def finish(self, job: int) -> None:
        """The copy takes no time."""


def ids(count: int, first: int = 0) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


class NoPool(FencedPool):
    """A pool without free pages, in which an allocation gets pages of the tree."""

    def __init__(self) -> None:
        super().__init__(0, Steps())

    def allocate(self, count: int) -> Int32Array:
        return ids(count)


def tree_of(
    num_blocks: int, target: int, kinds: Sequence[NodeParts] = ()
) -> tuple[RadixCache, HostTier]:
    """Return a tree with pages of one token. Stores keep `target` pages copied."""
    tree = RadixCache(1, Steps(), kinds=kinds)
    tier = HostTier(NoCopier(num_blocks), tree, NoPool())
    tier.target = target
    tier.open_blocks(num_blocks)
    return tree, tier


def add_chain(tree: RadixCache, length: int) -> None:
    """Add a chain of nodes with one page each."""
    for end in range(1, length + 1):
        tree.insert(ids(end), ids(end))


def store_all(tier: HostTier) -> None:
    """Let stores begin and end until none begins."""
    tier.store()
    while tier.jobs:
        tier.flush()
        tier.store()


@pytest.fixture
def recursion_limit() -> Iterator[int]:
    """A low limit on the depth of calls, so that a short chain of nodes exceeds it.

    The time to add a chain grows with the square of its length.
    """
    before, limit = sys.getrecursionlimit(), 300
    sys.setrecursionlimit(limit)
    yield limit
    sys.setrecursionlimit(before)


def test_the_eviction_of_a_node_drops_a_long_chain_below_it_in_host_memory(
    recursion_limit: int,
) -> None:
    length = recursion_limit + 100
    tree, tier = tree_of(2 * length, length)
    add_chain(tree, length)
    store_all(tier)
    assert len(tree.evict(length - 1)) == length - 1
    top = tree.hit(ids(1)).node
    tree.lock(top)  # the host tier drops its copy
    tree.unlock(top, 0)
    assert [each.pages.tolist() for each in tree.evict(1)] == [[0]]
    assert tree.hit(ids(length)).known_pages == 0
    assert tier.blocks.num_free == 2 * length


def test_a_store_of_a_chain_has_one_lock_and_a_limited_number_of_nodes() -> None:
    """A lock of each node would take seconds for a chain of thousands of nodes."""
    length = host._MAX_NODES + 50
    tree, tier = tree_of(length, length)
    add_chain(tree, length)
    tier.store()
    top = tree.hit(ids(1)).node
    assert top.lock_count == 1
    assert [len(job.nodes) for job in tier.jobs.values()] == [host._MAX_NODES]
    assert tier.locked_pages == length, "the path above the nodes is locked too"
    store_all(tier)
    assert tier.clean_pages == length
    assert (top.lock_count, tier.locked_pages) == (0, 0)


def test_usage_counts_each_block_once_and_totals_count_copies_and_evictions() -> None:
    tree, tier = tree_of(num_blocks=10, target=6)
    end = tree.insert(ids(4), ids(4))
    tier.store()
    assert tier.usage() == {"copied": 0, "host": 0, "moving": 4, "free": 6}
    store_all(tier)
    assert tier.usage() == {"copied": 4, "host": 0, "moving": 0, "free": 6}
    tree.evict(4)
    assert tier.usage() == {"copied": 0, "host": 4, "moving": 0, "free": 6}
    tree.lock(end)
    tier.load(end)
    assert tier.usage() == {"copied": 0, "host": 0, "moving": 4, "free": 6}
    tier.flush()
    store_all(tier)
    tree.evict(4)
    tier.drop_all()
    assert tier.usage() == {"copied": 0, "host": 0, "moving": 0, "free": 10}
    assert [tier.totals[name] for name in TOTALS] == [800, 400, 4, 4]


def test_the_rest_of_a_copied_prompt_leaves_the_gpu_before_a_newer_prompt() -> None:
    """Regression: a split made the first pages of an old prompt the newest ones of the tree."""
    length = 2 * host._MIN_PIECE
    prompts = [ids(length, first) for first in (0, length, 2 * length)]
    tree, tier = tree_of(num_blocks=3 * length, target=3 * length)
    for prompt in prompts:
        tree.insert(prompt, prompt)
    store_all(tier)
    for _ in range(2):  # each takes a half of the oldest prompt
        tree.evict(host._MIN_PIECE)
    assert [tree.hit(prompt).pages for prompt in prompts] == [0, length, length]


class Parts(NodeParts):
    """Counts the evictions that ask for a part."""

    asked = 0

    def usable(self, end: RadixNode, pages: int) -> int:
        return pages

    def evict(self, before: int | None, reused: bool) -> int:
        self.asked += 1
        return 0


def test_evictions_take_no_snapshot_while_a_leaf_has_a_copy() -> None:
    """Regression: chats lost the snapshot before their pages were copied: 8 % fewer hits."""
    parts = Parts()
    tree, tier = tree_of(num_blocks=10, target=2, kinds=[parts])
    tree.insert(ids(4), ids(4))
    store_all(tier)
    tree.evict(4)
    assert parts.asked == 0
    tree.insert(ids(4, 9), ids(4, 4))
    tree.evict(4)
    assert parts.asked > 0


def test_a_store_takes_no_memory_in_proportion_to_the_free_blocks() -> None:
    tree, tier = tree_of(2**20, 16)
    add_chain(tree, 16)
    tracemalloc.start()
    tier.store()
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert tier.jobs
    assert peak_bytes < 2**18


def test_a_node_whose_child_makes_room_for_its_copy_is_copied_once() -> None:
    """Regression: the eviction of the child offered the node again. Its blocks were lost."""
    tree, tier = tree_of(num_blocks=4, target=3)
    tree.insert(ids(2), ids(2))
    tree.insert(ids(3), ids(3))
    parent, other = tree.hit(ids(2)).node, tree.insert(ids(2, 7), ids(2, 7))
    tree.lock(parent)
    store_all(tier)
    tree.unlock(parent, 0)
    assert len(tree.evict(3)) == 2  # the child and `other` are in host memory only
    tier.target = 2
    store_all(tier)
    assert (parent.place, parent.children) == (Place.BOTH, {})
    tree.insert(ids(2, 7), ids(2, 7))  # two blocks are free again
    tier.target = 4
    tier.store()
    assert [job.nodes for job in tier.jobs.values()] == [[other]]
