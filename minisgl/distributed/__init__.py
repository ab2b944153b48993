"""Tensor-parallel ranks and the collectives between them.

This file exports no name: import from the modules.
"""

__all__: list[str] = []
