"""Tensor-parallel ranks and the collectives between them.

Import the names from their modules.
"""

__all__: list[str] = []
