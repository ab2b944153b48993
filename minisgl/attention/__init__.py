"""Attention over the paged KV pool: the interface, the backends and the choice between them.

Import the names from their modules.
"""

__all__: list[str] = []
