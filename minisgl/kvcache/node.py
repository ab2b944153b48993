"""The nodes of the prefix tree, and the prefixes that it finds."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from minisgl.core.batch import Int32Array


class Place(StrEnum):
    """The memory that holds the pages of a node. Without a host tier it is always GPU."""

    GPU = "gpu"
    COPYING = "copying"  # on the GPU; a job copies them to host memory
    BOTH = "both"  # an eviction frees the pages on the GPU, and the copy stays
    HOST = "host"
    LOADING = "loading"  # in host memory; a job copies them to the GPU


class NodeClass(IntEnum):
    """The classes of nodes in the order of eviction."""

    ENDED = 0  # only a session that has ended has used the node
    NEW = 1  # no request has matched the node since its insertion
    REUSED = 2  # a request has


@dataclass(slots=True, eq=False)
class CopyJob:
    """One copy between the GPU pool and host memory.

    nodes   the nodes with the pages, each after its children.
    locked  the ends of the paths that the job has locked. The paths contain all nodes of the job.
    loads   the copy goes to the GPU.
    """

    nodes: "list[RadixNode]"
    locked: "list[RadixNode]"
    loads: bool


@dataclass(slots=True, eq=False, repr=False)
class RadixNode:
    """A node of the tree, with the edge that leads to it from its parent.

    tokens      int32 [n * page_size]; the tokens of the edge.
    pages       int32 [n]; the pages of full attention that hold the KV of these tokens. -1 if the
                node is in host memory only.
    parts       the part of each further kind of memory (CacheKind) for the edge.
    key         the node's key in parent.children.
    last_use    time of the last match or insertion, from the cache's operation counter.
    node_id     number of the node; it orders nodes of equal last_use in the heap.
    lock_count  number of running requests whose prefix ends at or below this node.
    fence       the last step of the requests that have unlocked the node. This step may still read
                the pages. It is no earlier than the fence of any child.
    entry       number of the node's valid entry in EvictionHeaps; 0: it has none.
    kept_as     its class.
    session     the session whose requests alone have used the node; "": other requests may have.
    place       where the pages are.
    blocks      int32 [n]; the host blocks of the pages; None in the place GPU.
    job         the job that copies the pages.
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
    entry: int = 0
    kept_as: NodeClass = NodeClass.NEW
    session: str = ""
    place: Place = Place.GPU
    blocks: Int32Array | None = None
    job: CopyJob | None = None

    @property
    def on_gpu(self) -> bool:
        """A step can read the pages."""
        return self.place is not Place.HOST and self.place is not Place.LOADING

    @property
    def reused(self) -> bool:
        """A request has matched the node since its insertion, or since its session ended."""
        return self.kept_as is NodeClass.REUSED

    def path(self) -> "Iterator[RadixNode]":
        """Yield the nodes from this one up to the child of the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def places(self) -> "Iterator[tuple[RadixNode, int]]":
        """Yield the same nodes, each with the number of pages before it."""
        first = sum(len(node.pages) for node in self.path())
        for node in self.path():
            first -= len(node.pages)
            yield node, first

    def prefix_pages(self) -> Int32Array:
        """Return the pages of the prefix that ends with this node, int32."""
        pages = [self.pages[:0], *(node.pages for node in self.path())]
        return np.concatenate(pages[::-1])


class Hit(NamedTuple):
    """A cached prefix.

    node         the node of its last page; the root if it has no page. A prefix that `match` has
                 found ends with the node.
    pages        the number of its pages.
    tokens       the tokens that they hold.
    known_pages  the pages of the longest cached prefix. Not all kinds of memory can use all of it.
    junction     the same number if other cached tokens follow that prefix, so that requests part
                 there; otherwise 0.
    loadable     the number of pages that all kinds can use after the host tier has loaded them.
    last         the node of the last of the loadable pages. A prefix that `match` has found lets it
                 end with that page.
    """

    node: RadixNode
    pages: int
    tokens: int
    known_pages: int
    junction: int
    loadable: int
    last: RadixNode

    def nodes(self) -> Iterator[tuple[RadixNode, int]]:
        """Yield the nodes of the prefix from its end on, each with the number of its pages."""
        for node, first in self.node.places():
            yield node, min(len(node.pages), self.pages - first)


def pages_on_gpu(end: RadixNode, pages: int) -> int:
    """Return how many of the first `pages` pages up to `end` are on the GPU."""
    return min([pages, *(first for node, first in end.places() if not node.on_gpu)])


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
