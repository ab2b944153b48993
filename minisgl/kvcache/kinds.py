"""`CacheKind`: the interface of one kind of memory to the rows and to the prefix tree.

Full attention is the first kind: its pages give a node of the tree its length. Each further kind
stores a part beside the pages of a node (RadixNode.parts), and limits the hits, the admissions and
the chunks that it can serve. A model without a kind has no object for it. A subclass overrides the
abstract methods, and those whose default does not fit its memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from minisgl.core.batch import EngineLike, Int32Array, PageUpdates, StateCopies
from minisgl.core.rows import Prefixes, Rows
from minisgl.kvcache.host_parts import HostParts
from minisgl.kvcache.node import Hit, RadixNode

if TYPE_CHECKING:
    from minisgl.kvcache.memory import Memory


class Wanted(Protocol):
    """A request that waits for memory, or has some. max_total_tokens, largest_span: as in Rows.

    tokens       int32; all tokens so far.
    matchable    number of leading tokens that a cached prefix may cover.
    cache_salt   only requests with an equal salt share cached prefixes.
    session      as in AddReq.
    prefixes     as in Rows.
    """

    tokens: Int32Array
    cache_salt: str
    session: str
    max_total_tokens: int
    largest_span: int
    prefixes: Prefixes

    @property
    def matchable(self) -> int: ...


class KindRoom:
    """The room of a kind that one plan has left: counters that belong to the plan.

    A request that the plan admits has no row yet. The plan numbers it by a negative number.
    """

    def fits(self, wanted: Wanted, hit: Hit) -> bool:
        """The kind has room for a new row that begins with `hit`."""
        return True

    def pins(self, hit: Hit) -> int:
        """The number of pages of full attention that evictions cannot take once `hit` is used.

        The pages that the plan has counted for other new rows are left out.
        """
        return 0

    def open(self, row: int, wanted: Wanted, hit: Hit) -> None:
        """Count a new row, for which `fits` is True."""

    def grow(self, rows: Int32Array, tokens: Int32Array) -> Int32Array:
        """Count the next `tokens` tokens of decoding rows, each at least 1.

        Returns the number of tokens for which each row has room. A second call replaces the first
        one, as for `cut`.
        """
        return tokens

    def cut(self, row: int, start: int, tokens: int) -> int:
        """Count the next tokens of a row, up to `tokens` from position `start` on.

        Returns the number of tokens for which the row has room. A second call for the same row
        replaces the first one; its `tokens` are no fewer.
        """
        return tokens


class NodeParts(HostParts, ABC):
    """The parts of a kind of memory in the nodes of the prefix tree, which calls the methods.

    `usable` is pure. Each part stands in RadixNode.parts, at the index of its kind.
    """

    @abstractmethod
    def usable(self, end: RadixNode, pages: int) -> int:
        """Return the length of the longest hit within the first `pages` pages up to `end`."""

    def loadable(self, end: RadixNode, pages: int) -> int:
        """Return the same if the host tier loaded the prefix."""
        return self.usable(end, pages)

    def part(self, pages: int) -> Any:
        """Return the part of a new node with this number of pages."""
        return None

    def touch(self, node: RadixNode) -> None:
        """Mark the memory that a hit with the end `node` uses as used."""

    def split(self, upper: RadixNode, lower: RadixNode, pages: int) -> None:
        """Divide the part of `lower`, whose first `pages` pages `upper` has taken."""

    def drop(self, node: RadixNode, kept: int) -> int:
        """The tree evicts the pages of `node` after the first `kept` pages.

        Returns the number of pages of full attention that become free because of it.
        """
        return 0

    def evict(self, before: int | None, reused: bool) -> int:
        """Free the pages of full attention of one part, the least recently used one.

        before: only if its last use is before this time; None: the tree has no leaf to evict.
        reused: parts that a hit has used may be taken too.
        Returns the number of pages that become free; 0: there is no such part.
        """
        return 0


def agreed(pages: int, limits: Sequence[Callable[[int], int]]) -> int:
    """Return the longest hit within `pages` pages that all kinds can use.

    limits: the `usable` or `loadable` of each kind for one prefix.
    """
    before = -1
    while pages != before:
        before = pages
        for limit in limits:
            pages = limit(pages)
    return pages


class CacheKind(ABC):
    """A kind of memory beside full attention.

    `room` is pure, for the plan. `apply` and the end of a step call the writing methods. Memory
    that steps in flight use waits in Rows.steps.

    parts      the parts in the nodes of the tree.
    totals     the numbers of events since the start, by their names, for metrics.
    most_pins  the largest result of KindRoom.pins for one hit.
    """

    name: ClassVar[str]
    parts: NodeParts
    totals: dict[str, int]
    most_pins: int = 0

    @abstractmethod
    def room(self) -> KindRoom:
        """Return the counters of one plan."""

    @abstractmethod
    def usage(self) -> tuple[int, int, int]:
        """The numbers of pages that requests use, of pages only in the cache, and of the others."""

    def evictable(self) -> tuple[int, int]:
        """Numbers of pages of full attention in the parts: those that `evict` can free now, and
        those that steps in flight use."""
        return 0, 0

    def lock(self, hit: Hit) -> None:
        """Protect the part of a cached prefix that a new row uses. `open` follows."""

    @abstractmethod
    def open(self, row: int, hit: Hit) -> None:
        """Let a row begin with a cached prefix."""

    def grow(self, rows: Int32Array, tokens: Int32Array) -> None:
        """Give each row the memory of its next `tokens` tokens. A plan has counted it."""

    def advance(self, rows: Int32Array) -> None:
        """Drop the memory that no later step of these running rows reads."""

    def publish(self, row: int, node: RadixNode, pages: int) -> None:
        """Give the memory of a row's first `pages` pages, which end at `node`, to the tree."""

    def settle(self, row: int) -> None:
        """Called after `publish`, and also if a row publishes nothing."""

    @abstractmethod
    def close(self, row: int) -> None:
        """Take everything from a row. Its last step is the fence."""

    def updates(self, rows: Int32Array) -> PageUpdates:
        """Return the page-table entries of `rows` that the device does not have. They then count
        as sent."""
        return PageUpdates(rows[:0], rows[:0], rows[:0])

    def copies(self, step: int) -> StateCopies | None:
        """Return the copies of states for the batch `step`, which is launched next."""
        return None


# Makes a further kind from the engine, the columns, the memory and the index of its part in
# RadixNode.parts.
NewKind = Callable[[EngineLike, Rows, "Memory", int], CacheKind]
