"""The snapshots of recurrent states: their pages, and their places in the prefix cache."""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.kinds import NodeParts
from minisgl.kvcache.node import Place, RadixNode

if TYPE_CHECKING:
    from minisgl.kvcache.memory import Memory

# A snapshot whose loss costs at most this many times its price in tokens is dropped for a newer one
# below it, if no second request has continued from it.
MAX_GAP = 4
_NO_ROWS: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of the recurrent state of a row.

    pages     int32 [P]; pages of the KV pool that hold the copy.
    tokens    the state is that of the first `tokens` tokens, whole pages.
    request   number of the request that has saved it.
    branches  requests branch off here, so thinning keeps the snapshot.
    node      the snapshot belongs to the end of this node; None until the prompt is published.
    blocks    int32 [P]; the host blocks of the pages; None if the host tier has no copy. With
              blocks, the snapshot is in the place of its node. Without pages they are -1.
    last_use  as RadixNode.last_use, of the last match that ends here.
    reused    a match has ended here, or at a snapshot that this one has replaced.
    loads     number of rows that begin with it in the next batch.
    fence     the last launched step that copies from or to the pages.
    freed     the pages belong to the snapshot no more.
    """

    pages: Int32Array
    tokens: int
    request: int
    branches: bool
    node: RadixNode | None = None
    last_use: int = 0
    reused: bool = False
    loads: int = 0
    fence: int = 0
    freed: bool = False
    blocks: Int32Array | None = None

    @property
    def on_gpu(self) -> bool:
        """A step can load the pages."""
        return self.blocks is None or self.node is None or self.node.on_gpu

    @property
    def is_copied(self) -> bool:
        """A job of the host tier copies the pages."""
        return self.blocks is not None and self.node is not None and self.node.job is not None


class Snapshots(NodeParts):
    """All snapshots. The part of a node is the snapshot that is valid for its end, or None.

    If the node is split, the lower node keeps the snapshot.

    The pages come from the pool of the keys and values. Evictions take the older of a leaf of the
    tree and of a snapshot, by their last use. A leaf takes its own snapshot with it.

    num_pages  of a snapshot.
    own        the snapshots of prompts that are not published.
    fenced     the snapshots that evictions cannot take now.

    I1  A snapshot that is not freed is either in own, or the part of one node. _lru has those of
        nodes that have pages.
    I2  fenced holds the snapshots that the next batch loads, or that a step in flight or a job of
        the host tier copies. No eviction takes them. Their pages can be allocated after that step
        or job only.
    """

    def __init__(
        self, memory: "Memory", num_pages: int, index: int, steps: Steps, totals: dict[str, int]
    ) -> None:
        """index: of the part in RadixNode.parts. totals: as CacheKind.totals."""
        self._memory, self.num_pages, self._index = memory, num_pages, index
        self.own: dict[Snapshot, None] = {}
        # Least recently used first: new snapshots, and reused ones.
        self._lru: tuple[OrderedDict[Snapshot, None], ...] = (OrderedDict(), OrderedDict())
        self.fenced: dict[Snapshot, None] = {}
        self._steps, self._totals = steps, totals

    @property
    def num_cached(self) -> int:
        """The number of snapshots of the tree."""
        return sum(map(len, self._lru))

    def at(self, node: RadixNode) -> Snapshot | None:
        """Return the snapshot of a node."""
        found: Snapshot | None = node.parts[self._index] if node.parts else None
        return found

    def above(self, node: RadixNode) -> Iterator[Snapshot]:
        """The snapshots on the path from `node` to the root."""
        return (s for each in node.path() if (s := self.at(each)) is not None)

    def own_of(self, request: int) -> list[Snapshot]:
        """Return the snapshots of a request that wait until its prompt is published."""
        return [snapshot for snapshot in self.own if snapshot.request == request]

    def take(self, tokens: int, request: int, branches: bool) -> Snapshot | None:
        """Return a new snapshot; None if too few pages are left.

        Each running request that can still need a page keeps a page.
        """
        memory = self._memory
        left = memory.available - self.num_pages
        if left < memory.growing(_NO_ROWS, 0):
            return None
        snapshot = Snapshot(memory.pool.allocate(self.num_pages), tokens, request, branches)
        self.own[snapshot] = None
        return snapshot

    def attach(
        self, snapshot: Snapshot, end: RadixNode, before_answer: Snapshot | None = None
    ) -> None:
        """Give a snapshot to its node on the path to `end`.

        before_answer: given if `snapshot` is the state after an answer, and another request has
        saved the last snapshot before this answer. `before_answer` is that one. It is kept, because
        the next turn may leave the answer out.
        """
        tree = self._memory.tree
        node = tree.node_at(end, snapshot.tokens // self._memory.page_size)
        if self.at(node) is not None:
            self.release(snapshot)
            return
        del self.own[snapshot]
        node.parts[self._index] = snapshot
        snapshot.node, snapshot.last_use = node, tree.clock
        self._lru[0][snapshot] = None
        self._thin(snapshot, node, before_answer)

    def _thin(self, new: Snapshot, node: RadixNode, before_answer: Snapshot | None) -> None:
        """Drop up to two older snapshots above a new one, if little is lost with each.

        Requests that branch off after it then begin with the snapshot above it. One is kept if
        another request has continued from it. An answer that the next turn left out has not. Two
        are dropped, because a request may leave two: at its stable prompt and after its answer.

        If one of them was used, the new one counts as used too, with its node: the eviction of the
        new one now loses the whole chat, and not only its last turn.
        """
        path = {*node.path()}
        above = [each for each in self.above(node) if each not in (new, before_answer)]
        covered = [*(snapshot.tokens for snapshot in above[1:]), 0]
        for older, least in zip(above[:2], covered, strict=False):
            keeps = older.branches or older.loads > 0 or older.request == new.request
            keeps |= older.is_copied
            assert older.node is not None, "a snapshot in the tree must have a node; this is a bug"
            keeps |= any(each.reused for each in older.node.children.values() if each not in path)
            price = self.num_pages * self._memory.page_size
            if keeps or older.tokens - least > MAX_GAP * price:
                break
            if older.reused:
                self._memory.tree.mark_reused(node)
                self.touch(node)
            self.release(older)

    def release(self, snapshot: Snapshot) -> int:
        """Free a snapshot. Returns the number of pages that can be allocated at once."""
        if snapshot.node is None:
            del self.own[snapshot]
        else:
            snapshot.node.parts[self._index] = None
        freed = self._free_pages(snapshot)
        self._free_blocks(snapshot)
        snapshot.freed = True
        self.fenced.pop(snapshot, None)
        return freed

    def _free_pages(self, snapshot: Snapshot) -> int:
        """Free the pages, if it has some. Returns the number that can be allocated at once."""
        if snapshot.node is not None:
            if snapshot not in self._lru[snapshot.reused]:
                return 0
            del self._lru[snapshot.reused][snapshot]
        self._memory.pool.release(snapshot.pages, snapshot.fence)
        return self.num_pages if snapshot.fence <= self._steps.resolved else 0

    def _free_blocks(self, snapshot: Snapshot) -> None:
        if snapshot.blocks is not None:
            self._host_blocks.release(snapshot.blocks, fence=0)
            snapshot.blocks = None

    @property
    def _host_blocks(self) -> FencedPool:
        tier = self._memory.tier
        assert tier is not None, "only a host tier has blocks; this is a bug"
        return tier.blocks

    def usable(self, end: RadixNode, pages: int) -> int:
        """Return the pages up to the last snapshot on the GPU."""
        return next((at for each, at in self._up_to(end, pages) if each.on_gpu), 0)

    def loadable(self, end: RadixNode, pages: int) -> int:
        """Return the pages up to the last snapshot."""
        return next((at for _, at in self._up_to(end, pages)), 0)

    def _up_to(self, end: RadixNode, pages: int) -> Iterator[tuple[Snapshot, int]]:
        """Yield the snapshots up to page `pages` of `end`, the last one first, and their ends."""
        for node, first in end.places():
            at = first + len(node.pages)
            if at <= pages and (snapshot := self.at(node)) is not None:
                yield snapshot, at

    def drop(self, node: RadixNode, kept: int) -> int:
        """Free the snapshot of a node that loses its end."""
        return 0 if (snapshot := self.at(node)) is None else self._evicted(snapshot)

    def touch(self, node: RadixNode) -> None:
        """Mark the snapshot of a node as used."""
        if (snapshot := self.at(node)) is not None:
            del self._lru[snapshot.reused][snapshot]
            snapshot.reused = True
            self._lru[1][snapshot] = None
            self.refresh(snapshot)

    def refresh(self, snapshot: Snapshot) -> None:
        """Make a snapshot of the tree the most recently used one of its class."""
        snapshot.last_use = self._memory.tree.clock
        self._lru[snapshot.reused].move_to_end(snapshot)

    def lock(self, snapshot: Snapshot) -> None:
        """Protect a snapshot until the next batch has loaded it."""
        snapshot.loads += 1
        self.fenced[snapshot] = self._steps.waiting[self] = None

    def unlock(self, snapshot: Snapshot) -> None:
        """Undo one lock."""
        snapshot.loads -= 1
        self._unfence(snapshot)

    def record_copy(self, snapshot: Snapshot, step: int) -> None:
        """Step `step` copies from or to the pages."""
        snapshot.fence = step
        self.fenced[snapshot] = self._steps.waiting[self] = None

    def resolve(self) -> None:
        """Let evictions take the snapshots that completed steps have copied."""
        for snapshot in [*self.fenced]:
            self._unfence(snapshot)
        if not self.fenced:
            self._steps.waiting.pop(self, None)

    def _unfence(self, snapshot: Snapshot) -> None:
        if not (snapshot.loads or snapshot.is_copied or snapshot.fence > self._steps.resolved):
            self.fenced.pop(snapshot, None)

    def evict(self, before: int | None, reused: bool) -> int:
        """Free the least recently used snapshot.

        A snapshot that goes with an evictable leaf, or with a node that has a copy, is left to it.
        Those of prompts that are not published go last.
        """
        found = []
        for group in self._lru[: 2 if reused else 1]:
            for snapshot in group:
                if before is not None and snapshot.last_use >= before:
                    break
                if snapshot not in self.fenced and not self._goes_with_leaf(snapshot):
                    found.append(snapshot)
                    break
        if not found and before is None:
            found = [snapshot for snapshot in self.own if snapshot not in self.fenced][:1]
        return self._evicted(min(found, key=lambda s: s.last_use)) if found else 0

    def _evicted(self, snapshot: Snapshot) -> int:
        freed = self.release(snapshot)
        self._totals["evicted"] += 1
        return freed

    def _goes_with_leaf(self, snapshot: Snapshot) -> bool:
        node, tree = snapshot.node, self._memory.tree
        if node is None or tree.is_locked(node):
            return False
        return node.place is Place.BOTH or tree.is_free(node)

    # --- for the host tier ----------------------------------------------------------------------

    def store_pages(self, node: RadixNode) -> int:
        """The pages of a snapshot that a step has saved and that no step in flight uses."""
        snapshot = self.at(node)
        saved = snapshot is not None and snapshot.fence > 0 and snapshot not in self.fenced
        return self.num_pages if saved else 0

    def store(self, node: RadixNode) -> None:
        """Give the same snapshot host blocks."""
        if self.store_pages(node) and (snapshot := self.at(node)) is not None:
            snapshot.blocks = self._host_blocks.allocate(self.num_pages)
            self.fenced[snapshot] = self._steps.waiting[self] = None

    def load_pages(self, end: RadixNode) -> int:
        """The pages of a snapshot that is in host memory only."""
        snapshot = self.at(end)
        needed = snapshot is not None and not snapshot.on_gpu and not snapshot.is_copied
        return self.num_pages if needed else 0

    def load(self, end: RadixNode, pages: Int32Array) -> None:
        """Give the same snapshot these pages, and mark it as used."""
        if len(pages) and (snapshot := self.at(end)) is not None:
            snapshot.pages, snapshot.fence = pages, 0
            snapshot.reused, snapshot.last_use = True, self._memory.tree.clock
            self._lru[1][snapshot] = None
            self.fenced[snapshot] = self._steps.waiting[self] = None

    def copied(self, node: RadixNode) -> Iterator[tuple[Int32Array, Int32Array]]:
        """Yield the pages and the blocks of a snapshot that has both."""
        snapshot = self.at(node)
        if snapshot is not None and snapshot.blocks is not None:
            yield snapshot.pages, snapshot.blocks

    def end_copy(self, node: RadixNode) -> None:
        """Let evictions take the snapshot. After a load it needs no blocks."""
        if (snapshot := self.at(node)) is not None:
            if node.place is Place.GPU:
                self._free_blocks(snapshot)
            self._unfence(snapshot)

    def leave_gpu(self, node: RadixNode) -> int:
        """Free the pages of a snapshot, and one that has no copy."""
        if (snapshot := self.at(node)) is None:
            return 0
        if snapshot.blocks is None:
            return self._evicted(snapshot)
        freed = self._free_pages(snapshot)
        self.fenced.pop(snapshot, None)
        snapshot.pages = np.full_like(snapshot.pages, -1)
        return freed

    def drop_copy(self, node: RadixNode) -> None:
        """Free the blocks of a snapshot, and one that has no pages."""
        snapshot = self.at(node)
        if snapshot is None or snapshot.blocks is None:
            return
        if snapshot in self._lru[snapshot.reused]:
            self._free_blocks(snapshot)
        else:
            self._evicted(snapshot)
