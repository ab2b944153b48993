"""KV memory: the KV tensors, the pool of free pages, and the prefix cache."""

from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.radix import Match, RadixCache, RadixNode, common_prefix

__all__ = ["FencedPool", "Match", "RadixCache", "RadixNode", "common_prefix"]
