"""KV memory: the KV tensors, the pool of free pages, and the prefix cache."""

from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.node import CacheListener, Hit, Match, RadixNode
from minisgl.kvcache.radix import RadixCache, common_prefix
from minisgl.kvcache.windows import ABSENT, WindowPages

__all__ = [
    "ABSENT",
    "CacheListener",
    "FencedPool",
    "Hit",
    "Match",
    "RadixCache",
    "RadixNode",
    "WindowPages",
    "common_prefix",
]
