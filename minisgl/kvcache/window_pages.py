"""The pages of window layers: their users, and their entries in the prefix cache."""

from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.core.batch import Int32Array
from minisgl.core.rows import Steps
from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.kinds import NodeParts
from minisgl.kvcache.node import RadixNode

ABSENT = -1  # in place of a page id: the cache does not have the window page


class WindowPages(NodeParts):
    """The pages of window layers, their users, and their places in the prefix cache.

    The users of a page are the running requests whose window holds it. The prefix cache may have
    the page too. Several requests use one page if they have matched the same cached prefix. A page
    is freed when it has no user and is not cached.

    The part of a node has one entry for each page of the node: the window page of the same tokens,
    or ABSENT. A hit of m pages is usable if the last `span` pages before its end are present, or
    all m pages if there are fewer.

    span    pages that the window of the first token of a page reaches back: ceil((window - 1) /
            page_size).
    index   of the part in RadixNode.parts.
    pool    the ids of the pages.
    users   int32 [P]; number of running requests that use the page.
    cached  bool [P]; the prefix cache has the page.

    I1  A page is allocated in the pool while it has a user or is cached.
    I2  The fence of a released page is no earlier than the last step of each request that has used
        the page.
    I3  _lru holds each node with a window page, and only nodes of the tree. The least recently used
        window is first.
    """

    def __init__(self, num_pages: int, span: int, steps: Steps, index: int = 0) -> None:
        """steps: the steps that the fences refer to."""
        self.span, self.index = span, index
        self.pool = FencedPool(num_pages, steps, self.reclaim)
        self.users: Int32Array = np.zeros(num_pages, dtype=np.int32)
        self.cached = np.zeros(num_pages, dtype=np.bool_)
        self._last_step = np.zeros(num_pages, dtype=np.int64)
        self._lru: OrderedDict[RadixNode, None] = OrderedDict()

    def allocate(self, count: int) -> Int32Array:
        """Return `count` pages with one user each. The caller has checked that they are free."""
        pages = self.pool.allocate(count)
        self.users[pages] = 1
        self._last_step[pages] = 0
        return pages

    def use(self, pages: Int32Array) -> None:
        """Add one user to each of these pages. The ids are distinct."""
        self.users[pages] += 1

    def leave(self, pages: Int32Array, fence: int) -> None:
        """Remove one user from each of these pages. fence: the user's last launched step."""
        self.users[pages] -= 1
        self._last_step[pages] = np.maximum(self._last_step[pages], fence)
        self._release(pages[(self.users[pages] == 0) & ~self.cached[pages]])

    def remove(self, pages: Int32Array) -> None:
        """Record that the prefix cache does not have these pages any more."""
        self.cached[pages] = False
        self._release(pages[self.users[pages] == 0])

    def _release(self, pages: Int32Array) -> None:
        if len(pages):
            self.pool.release(pages, int(self._last_step[pages].max()))

    @property
    def available(self) -> int:
        """The number of pages that can be allocated now: free ones and those `reclaim` frees."""
        return self.pool.num_free + int(self._is_idle(np.flatnonzero(self.cached)).sum())

    def idle(self, pages: Int32Array) -> Int32Array:
        """Return those of the cached `pages` that `reclaim` could take."""
        return pages[self._is_idle(pages)]

    def freed(self, pages: Int32Array, fence: int) -> Int32Array:
        """Return those of `pages` that become available at once if a user drops them.

        fence: the user's last launched step.
        """
        if fence > self.pool.steps.resolved:
            return pages[:0]
        resolved = self._last_step[pages] <= self.pool.steps.resolved
        freed: Int32Array = pages[resolved & (self.users[pages] == 1)]
        return freed

    def _is_idle(self, pages: NDArray[np.integer[Any]]) -> NDArray[np.bool_]:
        """Return which of these pages neither a request nor a step in flight uses."""
        unused: NDArray[np.bool_] = self.users[pages] == 0
        unused &= self._last_step[pages] <= self.pool.steps.resolved
        return unused

    def usable(self, end: RadixNode, pages: int) -> int:
        """Return the pages up to the last one after a complete window."""
        windows = self.at_end(end, pages)
        index = np.arange(len(windows), dtype=np.int32)
        last_absent = np.maximum.accumulate(np.where(windows == ABSENT, index, -1))
        usable = index - last_absent >= np.minimum(self.span, index + 1)
        return int(usable.nonzero()[0][-1]) + 1 if usable.any() else 0

    def part(self, pages: int) -> Int32Array:
        """Return the part of a node without window pages."""
        return np.full(pages, ABSENT, dtype=np.int32)

    def part_of(self, node: RadixNode) -> Int32Array:
        """Return the window pages of a node, int32, one for each of its pages."""
        part: Int32Array = node.parts[self.index]
        return part

    def at_end(self, node: RadixNode, pages: int) -> Int32Array:
        """Return the window pages of the first `pages` pages of the prefix that ends at `node`."""
        parts = [self.part_of(each) for each in node.path()]
        return np.concatenate([np.empty(0, dtype=np.int32), *parts[::-1]])[:pages]

    def touch(self, end: RadixNode) -> None:
        """Mark the nodes with the last `span` pages of a hit as used."""
        left = self.span
        for node in end.path():
            if left <= 0:
                break
            self.mark_used(node)
            left -= len(node.pages)

    def fill(self, last: RadixNode, windows: Int32Array) -> None:
        """Store the given pages where the cache has none. last: the node at their end."""
        end = len(windows)
        for node in last.path():
            part, given = self.part_of(node), windows[end - len(node.pages) : end]
            end -= len(node.pages)
            new = (part == ABSENT) & (given != ABSENT)
            if new.any():
                part[new] = given[new]
                self.cached[given[new]] = True
                self.mark_used(node)

    def mark_used(self, node: RadixNode) -> None:
        """Make the window of a node the most recently used one, if the node has window pages."""
        if (self.part_of(node) != ABSENT).any():
            self._lru[node] = None
            self._lru.move_to_end(node)

    def split(self, upper: RadixNode, lower: RadixNode, pages: int) -> None:
        """Give the first `pages` entries of `lower` to `upper`."""
        part = self.part_of(lower)
        upper.parts[self.index], lower.parts[self.index] = part[:pages].copy(), part[pages:].copy()
        self.mark_used(upper)

    def drop(self, node: RadixNode, kept: int) -> int:
        """Remove the window pages after the first `kept` pages of a node from the cache."""
        part = self.part_of(node)
        node.parts[self.index], gone = part[:kept], part[kept:]
        self.remove(gone[gone != ABSENT])
        if not kept:
            self._lru.pop(node, None)
        return 0

    def reclaim(self, count: int) -> None:
        """Remove up to `count` idle pages, of the least recently used windows first.

        The prefixes stay cached, but a hit cannot end where its window is absent.
        """
        empty: list[RadixNode] = []
        for node in self._lru:
            if count <= 0:
                break
            part = self.part_of(node)
            present = np.flatnonzero(part != ABSENT)
            gone = present[self._is_idle(part[present])][:count]
            taken = part[gone]
            part[gone] = ABSENT
            self.remove(taken)
            count -= len(gone)
            if len(gone) == len(present):
                empty.append(node)
        for node in empty:
            del self._lru[node]
