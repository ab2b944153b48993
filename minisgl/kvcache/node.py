"""The nodes of the prefix tree, and the prefixes that it finds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from minisgl.core import Int32Array

Path = list[tuple["RadixNode", int]]  # nodes from the root on, each with a number of its pages


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """A node of the tree, with the edge that leads to it from its parent.

    tokens      int32 [n * page_size]; the tokens of the edge.
    pages       int32 [n]; the pages of full attention that hold the KV of these tokens.
    parts       the part of each further kind of memory (CacheKind) for the edge.
    key         the node's key in parent.children.
    last_use    time of the last match or insertion, from the cache's operation counter.
    node_id     number of the node; it orders nodes of equal last_use in the heap.
    lock_count  number of running requests whose prefix ends at or below this node.
    fence       the last step of the requests that have unlocked the node. This step may still read
                the pages. It is no earlier than the fence of any child.
    in_heap     the node has a valid entry in the heap of its class.
    reused      a request has matched the node since its insertion.
    """

    tokens: Int32Array
    pages: Int32Array
    parts: list[Any]
    parent: "RadixNode | None"
    key: bytes
    last_use: int
    node_id: int
    children: "dict[bytes, RadixNode]" = field(default_factory=dict)
    lock_count: int = 0
    fence: int = 0
    in_heap: bool = False
    reused: bool = False

    def path(self) -> "Iterator[RadixNode]":
        """Yield the nodes from this one up to the child of the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class Match(NamedTuple):
    """A cached prefix: the node at its end, and its pages, int32 [tokens / page_size].

    known_pages: the pages of the longest cached prefix. Not all kinds of memory can use all of it.
    junction: the same number if other cached tokens follow this prefix, so that requests part here;
    otherwise 0.
    """

    node: RadixNode
    pages: Int32Array
    known_pages: int
    junction: int


class Hit(NamedTuple):
    """A cached prefix that a plan has found, without a change. `match` finds the same prefix.

    pages: the number of its pages. tokens: the tokens that they hold. known_pages, junction: as in
    Match.
    """

    path: Path
    pages: int
    tokens: int
    known_pages: int
    junction: int


class Evicted(NamedTuple):
    """Pages that the cache has evicted, int32.

    fence: the last step that reads them. It has been resolved, except after `lift_fences`.
    """

    pages: Int32Array
    fence: int


class CacheListener(Protocol):
    """Learns of the prefixes that enter and leave the cache. Its methods must not block."""

    def stored(self, tokens: Int32Array, pages: Int32Array, salt: str) -> None:
        """The whole prefix `tokens` is cached in `pages`. A part of it may be known already."""

    def removed(self, pages: Int32Array) -> None:
        """These pages have been evicted."""
