"""KV memory: the tensors, the owner of free pages, and the prefix caches."""

from minisgl.kvcache.page_pool import PagePool
from minisgl.kvcache.prefix import CacheHandle, Evicted, Insertion, Match, NaiveCache, PrefixCache
from minisgl.kvcache.radix import RadixCache

__all__ = [
    "CacheHandle",
    "Evicted",
    "Insertion",
    "Match",
    "NaiveCache",
    "PagePool",
    "PrefixCache",
    "RadixCache",
]
