"""`HostTier`: a second place for cached pages, in host memory.

One prefix tree covers both places (RadixNode.place). Together they are one exclusive cache:

        GPU --store--> COPYING --> BOTH --evict--> HOST --load--> LOADING --> GPU
         ^                           |
         +----------- used ----------+

Stores copy the cold end of the GPU pool before an eviction needs its pages, so no eviction waits
for a copy. A request that uses a node in the place BOTH lets the host tier drop its copy. The host
tier evicts leaves, least recently used first.

The pages that a kind of memory holds in the same pool (NodeParts.copied) move with their node.

All decisions depend on replicated state alone. Rank 0 announces the ends of jobs (CopiesEnded), and
every rank applies them in the same iteration.
"""

from collections.abc import Iterable
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.batch import Int32Array
from minisgl.core.page_copier import PageCopier
from minisgl.core.rows import Steps
from minisgl.kvcache.eviction import IN_HOST
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.node import CopyJob, NodeClass, Place, RadixNode

if TYPE_CHECKING:
    from minisgl.kvcache.radix import RadixCache

MIN_LOAD_PAGES = 8  # fewer pages are computed again: a load takes one step more
_MIN_PIECE = 64  # pages; evictions and stores do not divide a node into smaller pieces
_MAX_NODES = 256  # of a store: it must not delay a step
_STORED = (NodeClass.NEW, NodeClass.REUSED)
TOTALS = ("bytes_to_host", "bytes_to_gpu", "hit_pages", "evicted_pages")
_CLEAN_SHARE = 8  # stores keep one of this many pages of the GPU pool free or copied


class HostTier:
    """The host blocks, the jobs, and the nodes in host memory.

    copier       copies pages.
    tree         the prefix cache.
    target       the number of pages of the GPU pool that stores keep free or copied.
    clean_pages  the number of pages that are copied (H5).
    blocks       the host blocks. No step uses one, so they are released with the fence 0.
    jobs         the open jobs by number, in the order of their starts.
    num_open     the number of the first blocks that stores may use (CopiesEnded).
    totals       numbers since the start, for metrics: bytes copied in each direction, pages that
                 requests loaded, and pages that left the host tier.

    H1  The cached nodes are closed towards the root, and so are those on the GPU. The GPU evicts
        nodes without a child on the GPU only, and the host tier nodes without any child.
    H2  Each block is free, or owned by one node. The nodes of a job are locked.
    H3  A page that a store reads is not evicted before the end of the job. A page that a load
        writes came out of the pool, so no step in flight reads it, and no row has it before the end
        of the job.
    H4  A store copies pages of resolved steps only, because prompts are published when their step
        is resolved.
    H5  Below a node in the place BOTH, no node has the place GPU. `clean_pages` counts these nodes'
        pages, and the GPU can evict all of them that are not fenced.
    """

    def __init__(self, copier: PageCopier, tree: "RadixCache", pool: FencedPool) -> None:
        """pool: the GPU pool. The blocks become usable from now on (PageCopier.start_opening)."""
        self.copier, self.tree, self._pool = copier, tree, pool
        self.target = max(pool.size // _CLEAN_SHARE, 1)
        self.clean_pages = self.num_open = 0
        self.jobs: dict[int, CopyJob] = {}
        self.totals = dict.fromkeys(TOTALS, 0)
        self.blocks = FencedPool(copier.num_blocks, Steps())
        self.blocks.allocate(copier.num_blocks)  # until `open_blocks`
        self._last_job = 0
        self._store_open = False  # one store at a time
        tree.tier = self
        copier.start_opening()

    @property
    def locked_pages(self) -> int:
        """The number of pages that only jobs lock. The ends of the jobs unlock them."""
        locks: dict[RadixNode, int] = {}
        for job in self.jobs.values():
            for node in chain.from_iterable(end.path() for end in job.locked):
                locks[node] = locks.get(node, 0) + 1
        return sum(len(node.pages) for node, count in locks.items() if count == node.lock_count)

    def usage(self) -> dict[str, int]:
        """The numbers of blocks by state.

        copied: the pages are on the GPU too. host: they are not. moving: a job copies them.
        """
        moving = [node for job in self.jobs.values() for node in job.nodes]
        moving_blocks = sum(len(blocks) for _, blocks in self._copied(moving))
        taken = self.num_open - self.blocks.num_free
        return {
            "copied": self.clean_pages,
            "host": taken - self.clean_pages - moving_blocks,
            "moving": moving_blocks,
            "free": self.blocks.num_free,
        }

    @property
    def is_opening(self) -> bool:
        """Whether stores may get further blocks."""
        return self.copier.is_opening or self.num_open < self.copier.num_open

    def open_blocks(self, count: int) -> None:
        """Let stores use the first `count` blocks. Waits for the copier of this rank."""
        self.copier.wait_open(count)
        opened: Int32Array = np.arange(self.num_open, count, dtype=np.int32)
        self.blocks.release(opened, fence=0)
        self.num_open = max(self.num_open, count)

    # --- jobs -----------------------------------------------------------------------------------

    def load(self, end: RadixNode) -> int:
        """Load the nodes up to `end` that are in host memory. Returns the last job to wait for.

        The caller has locked the path of `end`; the job unlocks it. 0: no job loads a part of it.
        """
        path = [*end.path()]
        nodes = [node for node in path if node.place is Place.HOST]
        loading = [job for job, each in self.jobs.items() if each.loads and path_has(path, each)]
        if not nodes:
            self.tree.unlock(end, 0)
            return loading[-1] if loading else 0
        kinds, counts = self.tree.kinds, [kind.load_pages(end) for kind in self.tree.kinds]
        position = sum(len(node.pages) for node in nodes)
        self.totals["hit_pages"] += position
        pages = self._pool.allocate(position + sum(counts))  # no step reads them
        parts = np.split(pages[position:], np.cumsum(counts)[:-1]) if kinds else []
        for kind, part in zip(kinds, parts, strict=True):
            for node in nodes:
                if node is not end:
                    kind.drop_copy(node)
            kind.load(end, part.copy())
        for node in nodes:
            position -= len(node.pages)
            node.pages = pages[position : position + len(node.pages)].copy()
            self.tree.leaves.withdraw(node)
            node.place = Place.LOADING
        return self._start(CopyJob(nodes, [end], True))

    def store(self) -> None:
        """Copy nodes of the cold end of the GPU pool, if too few of its pages are clean."""
        lacking = self.target - self.clean_pages
        lacking -= self._pool.num_free + self._pool.num_quarantined
        nodes: list[RadixNode] = []
        # A copy of nodes that only an ended session has used is of no use.
        order = [each for each in self.tree.eviction_order() if each in _STORED]
        while lacking > 0 and len(nodes) < _MAX_NODES and not self._store_open:
            node = self.tree.leaves.pop(order, self.tree.is_free)
            if node is None:
                break
            if len(node.pages) > max(lacking, _MIN_PIECE):
                self.tree.split(node, len(node.pages) - max(lacking, _MIN_PIECE))
            parts = sum(kind.store_pages(node) for kind in self.tree.kinds)
            if not self._make_room(len(node.pages) + parts):
                self.tree.offer(node)
                break
            self.tree.leaves.withdraw(node)  # the eviction of a child has offered it again
            node.place, node.blocks = Place.COPYING, self.blocks.allocate(len(node.pages))
            for kind in self.tree.kinds:
                kind.store(node)
            nodes.append(node)
            lacking -= len(node.pages)
            assert node.parent is not None, "the root has no pages; this is a bug"
            self.tree.offer(node.parent)
        if nodes:
            # The path of the deepest node of a branch has the other nodes of the branch.
            inner = {node.parent for node in nodes}
            ends = [node for node in nodes if node not in inner]
            for node in ends:
                self.tree.lock(node)
            self._store_open = True
            self._start(CopyJob(nodes, ends, False))

    def _start(self, job: CopyJob) -> int:
        self._last_job += 1
        self.jobs[self._last_job] = job
        for node in job.nodes:
            node.job = job
        pages, blocks = map(np.concatenate, zip(*self._copied(job.nodes), strict=True))
        self.copier.start(self._last_job, pages, blocks, job.loads)
        direction = "bytes_to_gpu" if job.loads else "bytes_to_host"
        self.totals[direction] += len(pages) * self.copier.block_bytes
        return self._last_job

    def _copied(self, nodes: Iterable[RadixNode]) -> list[tuple[Int32Array, Int32Array]]:
        """Return the pages and the blocks of these nodes and of their parts."""
        nodes = [*nodes]
        copied = [(node.pages, blocks_of(node)) for node in nodes]
        for kind, node in product(self.tree.kinds, nodes):
            copied += kind.copied(node)
        return copied

    def end(self, number: int) -> None:
        """End a job that rank 0 has announced. Waits for this rank's copy."""
        job = self.jobs.pop(number, None)
        if job is None:
            return  # a flush has ended it
        self.copier.finish(number)
        for node in job.nodes:
            node.job = None
            if job.loads:
                self._free_blocks(node)
                node.place = Place.GPU
                self.tree.mark_reused(node)
            else:
                node.place = Place.BOTH
                self.clean_pages += len(node.pages)
            for kind in self.tree.kinds:
                kind.end_copy(node)
        for node in job.locked:
            self.tree.unlock(node, 0)
            if job.loads:
                self._report(node)
        if not job.loads:
            self._store_open = False
            for node in job.nodes:
                if node.lock_count or any(c.place is Place.GPU for c in node.children.values()):
                    self.drop_copy(node)

    def _report(self, end: RadixNode) -> None:
        """Tell the listeners of the cache that the prefix that ends at `end` is on the GPU."""
        path = [*end.path()][::-1]
        for listener in self.tree.listeners:
            first, tokens = path[0], np.concatenate([node.tokens for node in path])
            page_bytes = first.tokens.nbytes // len(first.pages)
            listener.stored(tokens, end.prefix_pages(), first.key[:-page_bytes].decode())

    # --- the tree -------------------------------------------------------------------------------

    def drop_copy(self, node: RadixNode) -> None:
        """Drop the copy of a node in the place BOTH, because the node is in use."""
        self.clean_pages -= len(node.pages)
        self.tree.leaves.withdraw(node)
        self._free_blocks(node)
        node.place = Place.GPU
        for kind in self.tree.kinds:
            kind.drop_copy(node)
        self.tree.offer(node)

    def evict_copied(self, leaf: RadixNode, count: int) -> Int32Array:
        """Free `count` pages or more of a leaf in the place BOTH, or all. Returns the pages."""
        if len(leaf.pages) - count >= _MIN_PIECE:
            self.tree.split(leaf, len(leaf.pages) - max(count, _MIN_PIECE))
        self.clean_pages -= len(leaf.pages)
        return self._leave_gpu(leaf)

    def return_to_gpu(self, end: RadixNode, pages: Int32Array) -> RadixNode:
        """A request has computed the pages of the prefix that ends at `end`, int32 [n].

        The nodes in host memory get them. Returns the end of the part that no job loads.
        """
        for node, first in reversed([*end.places()]):
            if node.place is Place.LOADING:
                assert node.parent is not None, "the root has no pages; this is a bug"
                return node.parent
            if node.place is Place.HOST:
                for kind in self.tree.kinds:
                    kind.drop_copy(node)
                self._free_blocks(node)
                self._enter_gpu(node, pages[first : first + len(node.pages)].copy())
        return end

    def _leave_gpu(self, leaf: RadixNode) -> Int32Array:
        """Let a copied leaf be in host memory only. Returns its pages on the GPU."""
        taken, leaf.pages = leaf.pages, np.full_like(leaf.pages, -1)
        leaf.place = Place.HOST
        self.tree.count(leaf, -len(taken))
        for listener in self.tree.listeners:
            listener.removed(taken)
        assert leaf.parent is not None, "the root must not be evicted; this is a bug"
        self.tree.offer(leaf)
        self.tree.offer(leaf.parent)
        return taken

    def _enter_gpu(self, node: RadixNode, pages: Int32Array) -> None:
        """Give pages on the GPU to an unlocked node that was in host memory only."""
        self.tree.leaves.withdraw(node)
        node.pages, node.place = pages, Place.GPU
        self.tree.count(node, len(pages))
        self.tree.offer(node)

    def split(self, upper: RadixNode, lower: RadixNode, pages: int) -> None:
        """Divide the blocks of `lower`, whose first `pages` pages `upper` has taken."""
        if lower.blocks is not None:
            upper.blocks, lower.blocks = lower.blocks[:pages].copy(), lower.blocks[pages:].copy()
        if lower.job is not None:
            upper.job = lower.job
            lower.job.nodes.insert(lower.job.nodes.index(lower) + 1, upper)

    def drop_below(self, node: RadixNode) -> None:
        """The GPU evicts a node without a copy. The host tier drops the nodes below it."""
        below = [*node.children.values()]
        for each in below:  # appends to the list: a chain can be too long for a recursion
            assert each.place is Place.HOST, "the GPU holds a child; this is a bug"
            below += each.children.values()
        for each in reversed(below):
            self._remove(each)

    def flush(self) -> None:
        """End all jobs."""
        for number in [*self.jobs]:
            self.end(number)

    def drop_all(self) -> None:
        """Drop all nodes that are in host memory only."""
        self._make_room(self.copier.num_blocks)

    # --- blocks ---------------------------------------------------------------------------------

    def _free_blocks(self, node: RadixNode) -> None:
        self.blocks.release(blocks_of(node), fence=0)
        node.blocks = None

    def _make_room(self, count: int) -> bool:
        """Evict the least recently used leaves until `count` blocks are free, if there are any."""
        while self.blocks.num_free < count:
            node = self.tree.leaves.pop([IN_HOST], self.tree.is_free)
            if node is None:
                return False
            kept = max(len(node.pages) - (count - self.blocks.num_free), 0)
            if kept:
                self.tree.split(node, kept)
            self._remove(node)
        return True

    def _remove(self, leaf: RadixNode) -> None:
        """Remove a leaf that is in host memory only."""
        for kind in self.tree.kinds:
            kind.drop(leaf, 0)
        self.totals["evicted_pages"] += len(leaf.pages)
        self._free_blocks(leaf)
        self.tree.leaves.withdraw(leaf)
        self.tree.remove(leaf)


def blocks_of(node: RadixNode) -> Int32Array:
    """Return the host blocks of a node, int32."""
    assert node.blocks is not None, "the node must have a copy; this is a bug"
    return node.blocks


def path_has(path: Iterable[RadixNode], job: CopyJob) -> bool:
    """The job copies a node of the path."""
    return any(node.job is job for node in path)
