"""KV memory: the KV tensors, the pools of free pages, the kinds of memory and the prefix cache.

This file exports no name: import from the modules.
"""

__all__: list[str] = []
