"""Building blocks of tensor-parallel models: linears, norms, MLP, embedding, rotary tables.

Import them from their modules.
"""

__all__: list[str] = []
