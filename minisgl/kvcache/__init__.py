"""KV memory: the tensors, the owner of free pages, and the prefix cache."""

from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.radix import Match, RadixCache, RadixNode, common_prefix

__all__ = ["FencedPool", "Match", "RadixCache", "RadixNode", "common_prefix"]
