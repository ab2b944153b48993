"""minisgl's own attention kernel for decode steps, and torch's attention for prompts.

It is for GPUs and heads that FlashInfer cannot serve, such as the heads of 512 elements of Gemma 4.
"""

import torch

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionFeature,
    AttentionRule,
    AttentionStep,
    Capabilities,
    DecodeGraphAttention,
    StepAttention,
)
from minisgl.attention.decode import BalancedDecodes
from minisgl.attention.torch import TorchAttention
from minisgl.kvcache.pool import KVPool


class TritonAttention(AttentionBackend):
    """Decode steps run BalancedDecode, also in CUDA graphs. Prompts run on torch."""

    name = "triton"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256, 512),
        features=frozenset(AttentionFeature),
    )

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        self._prompts = TorchAttention(pool, q_heads, rule)
        self._decodes = BalancedDecodes(pool, q_heads, rule)

    def prepare(self, step: AttentionStep) -> StepAttention:
        return (self._decodes if step.num_decode else self._prompts).prepare(step)

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        return self._decodes.of_step(step)
