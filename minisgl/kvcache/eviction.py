"""`EvictionHeaps`: the leaves of the prefix tree, in the order of eviction."""

import heapq
from collections.abc import Callable, Sequence

from minisgl.kvcache.node import NodeClass, Place, RadixNode

COPIED = len(NodeClass)  # the heap of the leaves with a copy in host memory
IN_HOST = COPIED + 1  # the heap of those that are in host memory only


def heaps_in_order(reused_first: bool) -> list[int]:
    """Return the heaps of leaves on the GPU, in the order of eviction.

    reused_first: reused leaves go before new ones.
    """
    new, reused = NodeClass.NEW, NodeClass.REUSED
    return [NodeClass.ENDED, COPIED, *((reused, new) if reused_first else (new, reused))]


def _heap_of(node: RadixNode) -> int:
    if node.place is Place.BOTH:
        return COPIED
    return IN_HOST if node.place is Place.HOST else node.kept_as


class EvictionHeaps:
    """A heap for each class of leaves on the GPU alone, and two for the host tier.

    An eviction therefore takes O(log n).

    A leaf has at most one valid entry (RadixNode.entry). The last_use in the entry may be outdated;
    `pop` then inserts the leaf again. A heap may also hold void entries, of nodes that have changed
    their class since.
    """

    def __init__(self) -> None:
        # Entries are (last_use, node_id, number of the entry, node).
        self.heaps: list[list[tuple[int, int, int, RadixNode]]] = [[] for _ in range(IN_HOST + 1)]
        self._void = [0 for _ in self.heaps]
        self._newest = 0  # the number of the newest entry

    def push(self, node: RadixNode) -> None:
        """Add a leaf to the heap of its class, unless it has an entry."""
        if not node.entry:
            self._newest += 1
            node.entry = self._newest
            entry = (node.last_use, node.node_id, node.entry, node)
            heapq.heappush(self.heaps[_heap_of(node)], entry)

    def withdraw(self, node: RadixNode) -> None:
        """Make the entry of a node void, because its class or its place changes.

        A heap is rebuilt when more than half of its entries are void.
        """
        if not node.entry:
            return
        node.entry, place = 0, _heap_of(node)
        self._void[place] += 1
        if 2 * self._void[place] > len(self.heaps[place]):
            self.heaps[place] = [each for each in self.heaps[place] if each[2] == each[3].entry]
            heapq.heapify(self.heaps[place])
            self._void[place] = 0

    def pop(self, order: Sequence[int], is_free: Callable[[RadixNode], bool]) -> RadixNode | None:
        """Take the entry of the leaf that is evicted next; None: there is none.

        order: heaps; a later one is used when the earlier ones are empty. is_free: the node can be
        evicted. The entries of all others are dropped.
        """
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
