"""Events for other systems, such as pages that enter or leave the prefix cache. No code yet.

The seam will be a listener that the prefix cache (kvcache/) calls for insertions and evictions.
Entry points (server/worker_main.py, LLM) register this package; the core does not import it.
"""

__all__: list[str] = []
