"""Mixture-of-experts computation: the interface, the backends and the choice between them."""

from minisgl.moe.base import ExpertWeights, MoeBackend, route
from minisgl.moe.registry import MOE_BACKENDS, create_moe_backend
from minisgl.moe.torch_backend import TorchMoe

__all__ = [
    "MOE_BACKENDS",
    "ExpertWeights",
    "MoeBackend",
    "TorchMoe",
    "create_moe_backend",
    "route",
]
