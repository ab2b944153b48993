"""`minisgl plan`: what fits on a GPU, and how fast it can be, from a model's config.json alone."""

from minisgl.planning.command import main

__all__ = ["main"]
