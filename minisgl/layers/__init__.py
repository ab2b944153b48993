"""Building blocks of tensor-parallel models: linears, norms, embedding, rotary tables."""
