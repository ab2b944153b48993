"""Attention over the paged KV pool: the interface, the backends and the choice between them."""

from minisgl.attention.base import (
    AttentionBackend,
    AttentionNeeds,
    AttentionStep,
    Capabilities,
    DecodeGraphAttention,
    FusedAttention,
    LayerKind,
    StepAttention,
)
from minisgl.attention.registry import (
    attention_kernels,
    create_attention_backend,
    resolve_phases,
)

__all__ = [
    "AttentionBackend",
    "AttentionNeeds",
    "AttentionStep",
    "Capabilities",
    "DecodeGraphAttention",
    "FusedAttention",
    "LayerKind",
    "StepAttention",
    "attention_kernels",
    "create_attention_backend",
    "resolve_phases",
]
