"""Attention over the paged KV pool behind one small interface."""

from minisgl.attention.base import (
    AttentionBackend,
    AttentionStep,
    DecodeGraphAttention,
    FusedAttention,
    StepAttention,
)
from minisgl.attention.registry import (
    attention_kernels,
    create_attention_backend,
    resolve_phases,
)
from minisgl.attention.torch import TorchAttention

__all__ = [
    "AttentionBackend",
    "AttentionStep",
    "DecodeGraphAttention",
    "FusedAttention",
    "StepAttention",
    "TorchAttention",
    "attention_kernels",
    "create_attention_backend",
    "resolve_phases",
]
