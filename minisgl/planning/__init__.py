"""`minisgl plan`: the capacity of a GPU and the shortest time of a token, from config.json."""

from minisgl.planning.command import main

__all__ = ["main"]
