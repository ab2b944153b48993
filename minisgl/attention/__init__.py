"""Attention over the paged KV pool behind one small interface."""

import torch

from minisgl.attention.base import AttentionBackend, AttentionStep, StepAttention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.core import ConfigError
from minisgl.kvcache.pool import KVPool

__all__ = [
    "AttentionBackend",
    "AttentionStep",
    "StepAttention",
    "TorchAttention",
    "create_attention_backend",
]


def create_attention_backend(name: str, pool: KVPool, device: torch.device) -> AttentionBackend:
    """Make the backend called `name`; auto takes the best one for the device.

    Raises ConfigError that lists the known names.
    """
    del device  # the choice depends on it as soon as there is more than one backend
    if name in ("auto", "torch"):
        return TorchAttention(pool)
    raise ConfigError(f"attention backend {name!r} is not known; known: auto, torch")
