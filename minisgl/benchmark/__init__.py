"""`minisgl bench ...`: what things cost, measured. Prints tables for people, JSON for scripts."""

from minisgl.benchmark.cli import main

__all__ = ["main"]
