"""Mixture-of-experts computation behind one small interface."""

from minisgl.core import ConfigError
from minisgl.moe.base import MoeBackend, route
from minisgl.moe.torch_backend import TorchMoe

__all__ = ["MoeBackend", "TorchMoe", "create_moe_backend", "route"]


def create_moe_backend(name: str) -> MoeBackend:
    """Make the backend called `name`. Raises ConfigError that lists the known names."""
    if name in ("auto", "torch"):
        return TorchMoe()
    raise ConfigError(f"MoE backend {name!r} is not known; known: auto, torch")
