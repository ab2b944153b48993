"""Mixture-of-experts computation: the interface, the backends and the choice between them."""
