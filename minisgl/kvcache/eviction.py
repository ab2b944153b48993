"""`EvictionHeaps`: the leaves of the prefix tree, in the order of eviction."""

import heapq
from collections.abc import Callable

from minisgl.kvcache.node import NodeClass, RadixNode

_NEW_FIRST = (NodeClass.ENDED, NodeClass.NEW, NodeClass.REUSED)
_REUSED_FIRST = (NodeClass.ENDED, NodeClass.REUSED, NodeClass.NEW)


class EvictionHeaps:
    """A heap for each class of leaves, so an eviction takes O(log n).

    A leaf has at most one valid entry (RadixNode.entry). The last_use in the entry may be outdated;
    `pop` then inserts the leaf again. A heap may also hold void entries, of nodes that have changed
    their class since.
    """

    def __init__(self) -> None:
        # By class; entries are (last_use, node_id, number of the entry, node).
        self.heaps: list[list[tuple[int, int, int, RadixNode]]] = [[] for _ in NodeClass]
        self._void = [0 for _ in NodeClass]
        self._newest = 0  # the number of the newest entry

    def push(self, node: RadixNode) -> None:
        """Add a leaf to the heap of its class, unless it has an entry."""
        if not node.entry:
            self._newest += 1
            node.entry = self._newest
            entry = (node.last_use, node.node_id, node.entry, node)
            heapq.heappush(self.heaps[node.kept_as], entry)

    def withdraw(self, node: RadixNode) -> None:
        """Make the entry of a node void, because its class changes.

        A heap is rebuilt when more than half of its entries are void.
        """
        if not node.entry:
            return
        node.entry, place = 0, node.kept_as
        self._void[place] += 1
        if 2 * self._void[place] > len(self.heaps[place]):
            self.heaps[place] = [each for each in self.heaps[place] if each[2] == each[3].entry]
            heapq.heapify(self.heaps[place])
            self._void[place] = 0

    def pop(self, reused_first: bool, is_free: Callable[[RadixNode], bool]) -> RadixNode | None:
        """Take the entry of the leaf that is evicted next; None: there is none.

        reused_first: reused leaves go before new ones. is_free: the node can be evicted. The
        entries of all others are dropped.
        """
        order = _REUSED_FIRST if reused_first else _NEW_FIRST
        while (place := next((each for each in order if self.heaps[each]), None)) is not None:
            last_use, _, entry, node = heapq.heappop(self.heaps[place])
            if entry != node.entry:
                self._void[place] -= 1
                continue
            node.entry = 0
            if not is_free(node):
                continue
            if last_use == node.last_use:
                return node
            self.push(node)  # used since it was pushed
        return None
