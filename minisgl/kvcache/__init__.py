"""KV memory: the KV tensors, the pool of free pages, and the prefix cache."""

from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.radix import CacheListener, Match, RadixCache, RadixNode, common_prefix
from minisgl.kvcache.windows import ABSENT, WindowPages

__all__ = [
    "ABSENT",
    "CacheListener",
    "FencedPool",
    "Match",
    "RadixCache",
    "RadixNode",
    "WindowPages",
    "common_prefix",
]
