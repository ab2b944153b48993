"""Bytes, operations and rates: the shortest time of a step, and the memory of an engine.

The plan of a deployment (planning) and the benchmarks compare with these figures.
"""

__all__: list[str] = []
