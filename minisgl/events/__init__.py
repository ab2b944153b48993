"""Events for other systems, such as pages that enter or leave the prefix cache. Nothing yet.

The seam is the prefix cache (kvcache/), which reports insertions and evictions to a listener. Entry
points (server/worker_main.py, LLM) register this package; the core does not import it.
"""

__all__: list[str] = []
