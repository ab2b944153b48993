"""The engine: one tensor-parallel worker that runs the forward steps planned by the scheduler."""

from minisgl.engine.check import check_start
from minisgl.engine.engine import Engine
from minisgl.engine.extensions import DEFAULT_EXTENSIONS, Extensions
from minisgl.engine.memory import resolve_device

__all__ = ["DEFAULT_EXTENSIONS", "Engine", "Extensions", "check_start", "resolve_device"]
