"""Attention over the paged KV pool: the interface, the backends and the choice between them."""

from minisgl.attention.base import (
    AttentionBackend,
    AttentionStep,
    Capabilities,
    DecodeGraphAttention,
    FusedAttention,
    LayerKind,
    StepAttention,
)
from minisgl.attention.registry import (
    ATTENTION_BACKENDS,
    attention_kernels,
    compile_attention,
    create_attention_backend,
)
from minisgl.attention.torch import TorchAttention

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "AttentionStep",
    "Capabilities",
    "DecodeGraphAttention",
    "FusedAttention",
    "LayerKind",
    "StepAttention",
    "TorchAttention",
    "attention_kernels",
    "compile_attention",
    "create_attention_backend",
]
