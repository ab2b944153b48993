"""`minisgl bench ...`: benchmarks. Each prints a table, and one line of JSON for scripts."""

from minisgl.benchmark.cli import main

__all__ = ["main"]
