"""The engine: one tensor-parallel worker that runs the steps it is given."""

from minisgl.engine.engine import Engine
from minisgl.engine.settings import resolve_device

__all__ = ["Engine", "resolve_device"]
