"""KV memory: the tensors, the owner of free pages, and the prefix cache."""

from minisgl.kvcache.page_pool import PagePool
from minisgl.kvcache.radix import Match, RadixCache, RadixNode, common_prefix

__all__ = ["Match", "PagePool", "RadixCache", "RadixNode", "common_prefix"]
