"""Benchmarks for developers, outside the wheel: `python -m bench NAME`."""

__all__: list[str] = []
