"""Mixture-of-experts computation behind one small interface."""

import torch

from minisgl.core import ConfigError
from minisgl.moe.base import ExpertWeights, MoeBackend, route
from minisgl.moe.torch_backend import TorchMoe

__all__ = ["ExpertWeights", "MoeBackend", "TorchMoe", "create_moe_backend", "route"]


def create_moe_backend(name: str, device: torch.device) -> MoeBackend:
    """Make the backend called `name`; auto: torch on CPU, triton elsewhere.

    Raises ConfigError that lists the known names.
    """
    if name not in ("auto", "torch", "triton"):
        raise ConfigError(f"MoE backend {name!r} is not known; known: auto, torch, triton")
    if name == "torch" or (name == "auto" and device.type == "cpu"):
        return TorchMoe()
    if device.type == "cpu":
        raise ConfigError("MoE backend 'triton' needs a GPU")
    from minisgl.moe.triton_backend import TritonMoe

    return TritonMoe(device)
