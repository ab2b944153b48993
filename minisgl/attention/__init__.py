"""Attention over the paged KV pool: the interface, the backends and the choice between them."""
