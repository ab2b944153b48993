"""TensorRT-LLM's attention kernels, which FlashInfer 0.7 has, over the KV pool in its layout (NHD).

Hopper, RTX Blackwell   decode by XQA, which FlashInfer compiles for one page size and number of
                        query heads for each KV head. Prefill by FlashInferAttention.
Blackwell (10.0, 10.3)  both phases by TensorRT-LLM's compiled kernels, which FlashInfer downloads
                        at the first call; its package flashinfer-cubin has them too. No GPU of
                        this kind has run this code.

Decode steps with drafts run minisgl's kernel on all GPUs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionFeature,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    Capabilities,
    DecodeGraphAttention,
    StepAttention,
)
from minisgl.attention.blocks import BlockTables, chip_obstacle, prefix_sums
from minisgl.attention.decode import new_tokens
from minisgl.attention.flashinfer import FlashInferAttention
from minisgl.build.versions import package_obstacle
from minisgl.kvcache.pool import KVPool

_OLDEST = "0.7"
# The extra gpu allows FlashInfer 0.6 too, so pip would keep an installed 0.6.
_REMEDY = f"pip install 'flashinfer-python>={_OLDEST},<0.8'"
_COMPILED_MAJOR = 10  # the compute capability of which FlashInfer has compiled kernels
_MAJORS = (9, _COMPILED_MAJOR, 12)
_WORKSPACE_BYTES = 128 * 2**20  # the size that FlashInfer's documentation recommends
# XQA: 8 MiB of semaphores, and partial results of at most one block for each multiprocessor.
_XQA_WORKSPACE_BYTES = 32 * 2**20


class TrtllmAttention(AttentionBackend):
    """Attention by TensorRT-LLM's kernels where they are, by FlashInferAttention elsewhere."""

    name = "trtllm"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256),
        page_sizes=(16, 32, 64),
        features=frozenset({AttentionFeature.WINDOWS, AttentionFeature.SINKS}),
    )

    @classmethod
    def obstacle(cls, needs: AttentionNeeds) -> str | None:
        return (
            super().obstacle(needs)
            or package_obstacle("flashinfer-python", _OLDEST, _REMEDY)
            or chip_obstacle(needs.device, _MAJORS)
        )

    @classmethod
    def kernel_variants(cls, decode: bool, archs: Sequence[int]) -> frozenset[str]:
        others = [arch for arch in archs if arch // 10 != _COMPILED_MAJOR]
        return frozenset() if decode else FlashInferAttention.kernel_variants(False, others)

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        self._pool, self._rule = pool, rule
        self._other = FlashInferAttention(pool, q_heads, rule)
        major, _ = torch.cuda.get_device_capability(pool.device)
        self._compiled = major == _COMPILED_MAJOR
        size = _WORKSPACE_BYTES if self._compiled else _XQA_WORKSPACE_BYTES
        # Each call leaves the semaphores at zero, so no other kernel may write to this memory.
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=pool.device)

    def prepare(self, step: AttentionStep) -> StepAttention:
        if step.num_decode:
            if new_tokens(step) > 1:
                return self._other.prepare(step)
            decode = self._decode(BlockTables(self._pool, step, self._rule.window))
            decode.compute_metadata()
            return decode
        if not self._compiled:
            return self._other.prepare(step)
        return _Context(self._pool, self._rule, step, self._workspace)

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        if new_tokens(step) > 1:
            return self._other.decode_graph(size, step)
        return self._decode(BlockTables(self._pool, step, self._rule.window, captured=True))

    def _decode(self, blocks: BlockTables) -> "_Decode":
        return _Decode(self._pool, self._rule, blocks, self._workspace, self._compiled)


class _Decode:
    """Implements DecodeGraphAttention for one new token of each request.

    compiled: whether TensorRT-LLM's compiled kernels run instead of XQA.
    """

    def __init__(
        self,
        pool: KVPool,
        rule: AttentionRule,
        blocks: BlockTables,
        workspace: Tensor,
        compiled: bool,
    ) -> None:
        from flashinfer.decode import (
            trtllm_batch_decode_with_kv_cache,
            xqa_batch_decode_with_kv_cache,
        )

        self._pool, self._blocks = pool, blocks
        self._run = (
            trtllm_batch_decode_with_kv_cache if compiled else xqa_batch_decode_with_kv_cache
        )
        self._options = _options(pool, rule) | {
            "workspace_buffer": workspace,
            "block_tables": blocks.tables,
            "seq_lens": blocks.contexts,
            "max_seq_len": blocks.longest,
        }

    def compute_metadata(self) -> None:
        self._blocks.compute()

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self._run(q, self._pool.layer(layer), out=out, sinks=_float(sinks), **self._options)


class _Context:
    """Implements StepAttention for prefill chunks."""

    def __init__(
        self, pool: KVPool, rule: AttentionRule, step: AttentionStep, workspace: Tensor
    ) -> None:
        from flashinfer.prefill import trtllm_batch_context_with_kv_cache

        self._pool, self._run = pool, trtllm_batch_context_with_kv_cache
        blocks = BlockTables(pool, step, rule.window)
        blocks.compute()
        self._options = _options(pool, rule) | {
            "workspace_buffer": workspace,
            "block_tables": blocks.tables,
            "seq_lens": blocks.contexts,
            "max_q_len": int(step.lengths.max()),
            "max_kv_len": blocks.longest,
            "batch_size": len(step.lengths),
            "cum_seq_lens_q": prefix_sums(step.device_lengths),
            "cum_seq_lens_kv": prefix_sums(blocks.contexts),
        }

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self._run(q, self._pool.layer(layer), out=out, sinks=_float(sinks), **self._options)


def _options(pool: KVPool, rule: AttentionRule) -> dict[str, Any]:
    """The arguments that all calls of the layers share."""
    return {
        "bmm1_scale": pool.spec.head_dim**-0.5,
        "bmm2_scale": 1.0,
        # FlashInfer counts the tokens before the token itself.
        "window_left": -1 if rule.window is None else rule.window - 1,
        "kv_layout": "NHD",
    }


def _float(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.float()
