"""`minisgl plan`: the KV capacity and the shortest time of a token on a GPU, from config.json."""

from minisgl.planning.command import main

__all__ = ["main"]
