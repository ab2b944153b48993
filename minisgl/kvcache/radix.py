"""A radix tree over pages of token ids: which prompt KV is in which pages.

The idea is RadixAttention's (Zheng et al., SGLang, 2024, section 3). Edges hold whole pages, so a
child is found by the bytes of its first page, and edges are compared as arrays. Below the root
the salt stands before these bytes (pages have one size, so this is unambiguous): what differs in
salt shares nothing.

Evicted are leaves that no req has found since they were inserted, least recently used first, so
that prompts that come once do not drive out what many begin with; and where more than half of what
is unlocked has been found, its leaves (a segmented LRU: Karedla, Love and Wherry, 1994).
Either kind has a heap: an eviction costs O(log n).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from minisgl.core import Int32Array, InvariantBroken


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """An edge of whole pages and what hangs below it.

    tokens int32 [n * page_size], pages int32 [n]. lock_count: running reqs at or below this node.
    key: under which its parent holds it. last_use: operation counter. fence: the last step that a
    req which unlocked it was part of. reused: a req has found it.
    """

    tokens: Int32Array
    pages: Int32Array
    parent: "RadixNode | None"
    key: bytes
    last_use: int
    serial: int
    children: "dict[bytes, RadixNode]" = field(default_factory=dict)
    lock_count: int = 0
    fence: int = 0
    in_heap: bool = False
    reused: bool = False


class Match(NamedTuple):
    """What the cache has of a key: where that ends, and its pages int32 [tokens / page_size]."""

    node: RadixNode
    pages: Int32Array


class Evicted(NamedTuple):
    """pages: given up by the cache. fence: the last step that may touch them."""

    pages: Int32Array
    fence: int


def common_prefix(a: Int32Array, b: Int32Array) -> int:
    """Number of leading ids that are equal."""
    length = min(len(a), len(b))
    different = a[:length] != b[:length]
    return int(different.argmax()) if different.any() else length


class RadixCache:
    """The prefix cache of the engine. Keys are whole pages of token ids, under a salt.

    Time is a counter of operations, so that tensor-parallel ranks agree on what is old.
    evictable_pages: of unlocked nodes; locked_pages: of those that running reqs use.

    I1  lock_count of a node >= lock_count of each child: what is locked is locked to the root.
    I2  evictable_pages + locked_pages == pages held by all nodes.
    I3  every unlocked leaf has exactly one valid entry, in the heap of its kind; its stamp may be
        old, but a node is never lost. The first heap may hold void ones, of nodes found since.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._clock = 0
        self._serial = 0
        self._heaps: list[list[tuple[int, int, RadixNode]]] = [[], []]  # of the reused: the second
        self._reused_pages = self._void_entries = 0  # evictable ones; of the first heap
        nothing: Int32Array = np.empty(0, dtype=np.int32)
        self._root = RadixNode(nothing, nothing, None, b"", 0, 0)
        self.evictable_pages = 0
        self.locked_pages = 0

    def match(self, tokens: Int32Array, salt: str = "") -> Match:
        """The longest cached prefix. Splits an edge that matches in part, and counts as a use."""
        self._clock += 1
        node, found, _ = self._walk(tokens, salt)
        for each in self._path(node):
            if not each.reused:
                self._reuse(each)
        return Match(node, self._joined(found))

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: str = "") -> Match:
        """Add the part of the key that is new; the part that was there keeps its own pages.

        The cache owns the pages returned. Where an id differs from the one given, the key was there
        already: the given page stays with the caller, who points its page table at what is returned
        and frees its own.
        """
        if len(tokens) != len(pages) * self._page_size:
            raise InvariantBroken(
                f"{len(tokens)} tokens do not fill {len(pages)} pages; this is a bug"
            )
        self._clock += 1
        node, found, known_tokens = self._walk(tokens, salt)
        if known_tokens < len(tokens):
            known_pages = known_tokens // self._page_size
            rest = tokens[known_tokens:].copy()
            key = self._key(node, rest, salt)
            leaf = self._new_node(rest, pages[known_pages:].copy(), node, key)
            node.children[key] = leaf
            self.evictable_pages += len(leaf.pages)
            self._offer(leaf)
            node = leaf
            found.append(leaf.pages)
        return Match(node, self._joined(found))

    def lock(self, end: RadixNode) -> None:
        """Forbid eviction from the root to `end`: O(depth)."""
        for node in self._path(end):
            if node.lock_count == 0:
                self.evictable_pages -= len(node.pages)
                self.locked_pages += len(node.pages)
                self._reused_pages -= len(node.pages) * node.reused
            node.lock_count += 1

    def unlock(self, end: RadixNode, fence: int) -> None:
        """Undo one lock; the pages may be touched until step `fence` has completed.

        Raises InvariantBroken when there is no lock.
        """
        for node in self._path(end):
            if node.lock_count == 0:
                raise InvariantBroken("a node is unlocked more often than locked; this is a bug")
            node.lock_count -= 1
            node.fence = max(node.fence, fence)
            if node.lock_count == 0:
                self.locked_pages -= len(node.pages)
                self.evictable_pages += len(node.pages)
                self._reused_pages += len(node.pages) * node.reused
                self._offer(node)

    def evict(self, count: int) -> list[Evicted]:
        """Give up min(count, evictable_pages) pages. The last leaf is cut, not dropped whole."""
        evicted: list[Evicted] = []
        while count > 0 and any(self._heaps):
            crowded = 2 * self._reused_pages > self.evictable_pages
            reused = bool(self._heaps[1]) and (crowded or not self._heaps[0])
            stamp, _, node = heapq.heappop(self._heaps[reused])
            if node.reused != reused:
                self._void_entries -= 1
                continue
            node.in_heap = False
            if node.lock_count or node.children:
                continue
            if stamp != node.last_use:
                self._offer(node)
                continue
            taken = min(count, len(node.pages))
            evicted.append(Evicted(self._cut(node, taken), node.fence))
            count -= taken
        return evicted

    def check_integrity(self) -> None:
        """Walk the whole tree and compare I1-I3 with the counters (tests and idle moments)."""
        evictable = locked = reused = 0
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            parent = node.parent
            if len(node.tokens) != len(node.pages) * self._page_size or not len(node.pages):
                raise InvariantBroken("a node's tokens do not fill its pages; this is a bug")
            if parent is None or (parent is not self._root and parent.lock_count < node.lock_count):
                raise InvariantBroken("a node is locked but its parent is not; this is a bug")
            if not node.lock_count and not node.children and not node.in_heap:
                raise InvariantBroken("an unlocked leaf cannot be evicted; this is a bug")
            if node.lock_count:
                locked += len(node.pages)
            else:
                evictable += len(node.pages)
                reused += len(node.pages) * node.reused
            stack.extend(node.children.values())
        if reused != self._reused_pages:
            raise InvariantBroken(f"{reused} pages are reused, counted {self._reused_pages}")
        if (evictable, locked) != (self.evictable_pages, self.locked_pages):
            raise InvariantBroken(
                f"tree holds {evictable} evictable and {locked} locked pages, counted "
                f"{self.evictable_pages} and {self.locked_pages}; this is a bug"
            )

    def _walk(self, tokens: Int32Array, salt: str) -> tuple[RadixNode, list[Int32Array], int]:
        """Follow `tokens` down: the last node, the pages on the way, the tokens they cover."""
        node, position, found = self._root, 0, []
        while position + self._page_size <= len(tokens):
            child = node.children.get(self._key(node, tokens[position:], salt))
            if child is None:
                break
            shared_pages = common_prefix(child.tokens, tokens[position:]) // self._page_size
            if shared_pages < len(child.pages):
                child = self._split(child, shared_pages)
            child.last_use = self._clock
            found.append(child.pages)
            position += shared_pages * self._page_size
            node = child
        return node, found, position

    def _split(self, node: RadixNode, num_pages: int) -> RadixNode:
        """Put a new node with the first `num_pages` pages above `node`; return the new one."""
        parent, cut = node.parent, num_pages * self._page_size
        assert parent is not None, "the root has no edge to split: this is a bug"
        pages = node.pages[:num_pages].copy()
        upper = self._new_node(node.tokens[:cut].copy(), pages, parent, node.key)
        upper.lock_count, upper.fence, upper.reused = node.lock_count, node.fence, node.reused
        parent.children[upper.key] = upper
        node.tokens, node.pages = node.tokens[cut:].copy(), node.pages[num_pages:].copy()
        node.parent = upper
        node.key = self._key(upper, node.tokens, "")
        upper.children[node.key] = node
        return upper

    def _cut(self, node: RadixNode, num_pages: int) -> Int32Array:
        """Take the last pages off an unlocked leaf, and the leaf off the tree when none is left."""
        kept = len(node.pages) - num_pages
        taken = node.pages[kept:]
        self.evictable_pages -= num_pages
        self._reused_pages -= num_pages if node.reused else 0
        if kept:
            node.pages, node.tokens = node.pages[:kept], node.tokens[: kept * self._page_size]
            self._offer(node)
            return taken
        parent = node.parent
        assert parent is not None, "the root is never evicted: this is a bug"
        del parent.children[node.key]
        node.parent = None
        self._offer(parent)
        return taken

    def _reuse(self, node: RadixNode) -> None:
        """A req has found `node`: what it has in the first heap is void, and few void ones stay."""
        node.reused = True
        self._reused_pages += 0 if node.lock_count else len(node.pages)
        self._void_entries += node.in_heap
        node.in_heap = False
        self._offer(node)
        if 2 * self._void_entries > len(self._heaps[0]):
            self._heaps[0] = [entry for entry in self._heaps[0] if not entry[2].reused]
            heapq.heapify(self._heaps[0])
            self._void_entries = 0

    def _offer(self, node: RadixNode) -> None:
        """Enter `node` into the heap if it can be evicted and is not there yet (I3)."""
        if node.in_heap or node.lock_count or node.children or node.parent is None:
            return
        node.in_heap = True
        heapq.heappush(self._heaps[node.reused], (node.last_use, node.serial, node))

    def _path(self, end: RadixNode) -> Iterator[RadixNode]:
        """From `end` up to, not including, the root."""
        node: RadixNode | None = end
        while node is not None and node is not self._root:
            yield node
            node = node.parent

    def _new_node(
        self, tokens: Int32Array, pages: Int32Array, parent: RadixNode, key: bytes
    ) -> RadixNode:
        self._serial += 1
        return RadixNode(tokens, pages, parent, key, self._clock, self._serial)

    def _key(self, parent: RadixNode, tokens: Int32Array, salt: str) -> bytes:
        page = tokens[: self._page_size].tobytes()
        return salt.encode() + page if salt and parent is self._root else page

    def _joined(self, found: list[Int32Array]) -> Int32Array:
        return np.concatenate(found) if found else self._root.pages
