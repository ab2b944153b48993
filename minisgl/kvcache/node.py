"""The nodes of the prefix tree, and the prefixes that it finds."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from minisgl.core import Int32Array


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """A node of the tree, with the edge that leads to it from its parent.

    tokens      int32 [n * page_size]; the tokens of the edge.
    pages       int32 [n]; the pages that hold the KV of these tokens.
    key         the node's key in parent.children.
    last_use    time of the last match or insertion, from the cache's operation counter.
    node_id     number of the node; it orders nodes of equal last_use in the heap.
    lock_count  number of running requests whose prefix ends at or below this node.
    fence       the last step of the requests that have unlocked the node. This step may still read
                the pages. It is no earlier than the fence of any child.
    in_heap     the node has a valid entry in the heap of its class.
    reused      a request has matched the node since its insertion.
    windows     int32 [n]; the window page of each page, or ABSENT. Empty without window layers.
    """

    tokens: Int32Array
    pages: Int32Array
    windows: Int32Array
    parent: "RadixNode | None"
    key: bytes
    last_use: int
    node_id: int
    children: "dict[bytes, RadixNode]" = field(default_factory=dict)
    lock_count: int = 0
    fence: int = 0
    in_heap: bool = False
    reused: bool = False


class Match(NamedTuple):
    """A cached prefix: the node at its end, and its pages, int32 [tokens / page_size].

    Of a model with window layers also:
    windows      int32, as long as `pages`; the window pages. ABSENT where the cache has none.
    known_pages  pages of the longest cached prefix, even if its window is absent.
    """

    node: RadixNode
    pages: Int32Array
    windows: Int32Array | None = None
    known_pages: int = 0


class Hit(NamedTuple):
    """A cached prefix that a plan has found. It changes nothing; `match` finds the same prefix.

    path     the nodes from the root on, each with the number of its pages in the prefix.
    pages    the number of all pages; tokens: the tokens that they hold.
    windows  int32 [pages] of a model with window layers, as in Match.
    """

    path: list[tuple[RadixNode, int]]
    pages: int
    tokens: int
    windows: Int32Array | None = None


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
