"""KV memory: the KV tensors, the pool of free pages, and the prefix cache."""

from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.radix import CacheListener, Match, RadixCache, RadixNode, common_prefix

__all__ = ["CacheListener", "FencedPool", "Match", "RadixCache", "RadixNode", "common_prefix"]
