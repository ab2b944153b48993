"""KV memory: the KV tensors, the pools of free pages, the kinds of memory and the prefix cache."""

from minisgl.kvcache.fenced_pool import FencedPool
from minisgl.kvcache.kinds import CacheKind, KindRoom, NewKind, NodeParts, Wanted
from minisgl.kvcache.lookup import common_prefix
from minisgl.kvcache.memory import Memory, Room
from minisgl.kvcache.node import CacheListener, Hit, NodeClass, RadixNode
from minisgl.kvcache.radix import RadixCache

__all__ = [
    "CacheKind",
    "CacheListener",
    "FencedPool",
    "Hit",
    "KindRoom",
    "Memory",
    "NewKind",
    "NodeClass",
    "NodeParts",
    "RadixCache",
    "RadixNode",
    "Room",
    "Wanted",
    "common_prefix",
]
