"""Typed messages between processes, and the queues that carry them."""

__all__: list[str] = []
