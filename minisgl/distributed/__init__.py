"""Tensor-parallel ranks and the collectives between them."""
