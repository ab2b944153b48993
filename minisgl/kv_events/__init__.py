"""Events of the prefix cache for other systems: the blocks that enter and leave the prefix cache.

The prefix cache (kvcache/) calls a `CacheListener` at each insertion and eviction. The entry point
(launch/worker_main.py) registers this package; the core does not import it.
"""

from minisgl.kv_events.cache_events import CacheEvents

__all__ = ["CacheEvents"]
