"""Building blocks of tensor-parallel models: linears, norms, embedding, rotary tables.

Import them from their modules.
"""

__all__: list[str] = []
