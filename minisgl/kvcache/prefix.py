"""The seam between the scheduler and a prefix cache, and the cache that keeps nothing."""

from typing import NamedTuple, Protocol

import numpy as np

from minisgl.core import Int32Array


class CacheHandle(Protocol):
    """A place in the cache that can be locked. Opaque to the scheduler."""

    @property
    def lock_count(self) -> int: ...


class Match(NamedTuple):
    """The longest cached prefix: where it ends, and its pages [tokens / page_size]."""

    handle: CacheHandle
    pages: Int32Array


class Insertion(NamedTuple):
    """handle: the end of the inserted key. pages: the ids that hold this key from now on.

    The cache owns `pages`. Where an id differs from the one given, the key was there already, and
    the given page stays with the caller, who points its page table at `pages` and frees its own.
    """

    handle: CacheHandle
    pages: Int32Array


class Evicted(NamedTuple):
    """pages: given up by the cache. fence: the last step that may touch them."""

    pages: Int32Array
    fence: int


class PrefixCache(Protocol):
    """Prompt KV that later requests may reuse. Keys are whole pages of token ids.

    Time is a counter of operations, so that tensor-parallel ranks agree on what is old.
    """

    @property
    def evictable_pages(self) -> int: ...

    @property
    def locked_pages(self) -> int: ...

    def match(self, tokens: Int32Array, salt: str = "") -> Match:
        """The longest prefix of `tokens` cached under `salt`, in whole pages. Does not lock it."""
        ...

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: str = "") -> Insertion:
        """Hand over the KV of `tokens`; len(tokens) == len(pages) * page_size."""
        ...

    def lock(self, handle: CacheHandle) -> None:
        """Forbid eviction of everything from the root to `handle`."""
        ...

    def unlock(self, handle: CacheHandle, fence: int) -> None:
        """Undo one lock; the pages may be touched until step `fence` has completed."""
        ...

    def evict(self, count: int) -> list[Evicted]:
        """Give up at least min(count, evictable_pages) pages, least recently used first."""
        ...

    def check_integrity(self) -> None:
        """Raise InvariantBroken when a counter disagrees with the structure."""
        ...


class _Nowhere:
    """The only handle of a cache that keeps nothing."""

    lock_count = 0


class NaiveCache:
    """Keeps nothing: every prompt is computed from its start."""

    evictable_pages = 0
    locked_pages = 0

    def __init__(self) -> None:
        self._root = _Nowhere()
        self._no_pages: Int32Array = np.empty(0, dtype=np.int32)

    def match(self, tokens: Int32Array, salt: str = "") -> Match:
        return Match(self._root, self._no_pages)

    def insert(self, tokens: Int32Array, pages: Int32Array, salt: str = "") -> Insertion:
        """Takes nothing over: all pages stay with the caller."""
        return Insertion(self._root, self._no_pages)

    def lock(self, handle: CacheHandle) -> None:
        pass

    def unlock(self, handle: CacheHandle, fence: int) -> None:
        pass

    def evict(self, count: int) -> list[Evicted]:
        return []

    def check_integrity(self) -> None:
        pass
