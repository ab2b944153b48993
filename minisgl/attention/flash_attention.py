"""Attention by flash-attn-4: FlashAttention in the CuTe DSL, a beta, over the pages of the pool.

It compiles a kernel at the first call with new options. On Hopper it compiles one for prefill and
one for each number of new tokens of decode requests, so the warm-up compiles them all. On Blackwell
the kernel also depends on the numbers of new tokens and requests of a step, so a step after the
warm-up may compile one. The kernels of Hopper do not split a context, so long contexts of few
decode requests leave most of the GPU idle.
Source: https://github.com/Dao-AILab/flash-attention, flash_attn/cute.
"""

from collections.abc import Callable
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
    InTurn,
    StepAttention,
)
from minisgl.attention.blocks import BlockTables, chip_obstacle, prefix_sums
from minisgl.build.versions import package_obstacle
from minisgl.kvcache.pool import KVPool

_OLDEST = "4.0.0b36"
_MAJORS = (9, 10)  # the compute capabilities whose kernels read pages
# flash-attn-4 compiles another kernel for more requests with several tokens each.
_MOST_PROMPTS = 256


class FlashAttention(AttentionBackend):
    """Attention of both phases. Decode requests may have several new tokens.

    A page as large as a tile of keys would be read by the bulk copy engine, together with the rows
    after the end of the context. A NaN there would reach the output, so such pages are refused.
    """

    name = "flash-attention"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256),
        page_sizes=(1, 2, 4, 8, 16, 32, 64),
        features=frozenset(set(AttentionFeature) - {AttentionFeature.FP8_KV}),
    )

    @classmethod
    def obstacle(cls, needs: AttentionNeeds) -> str | None:
        found = (
            super().obstacle(needs)
            or package_obstacle("flash-attn-4", _OLDEST, "pip install minisgl[flash-attention]")
            or chip_obstacle(needs.device, _MAJORS)
        )
        windows = any(rule.window is not None for rule in needs.rules)
        if found is None and windows and (needs.head_dim, needs.page_size) == (256, 64):
            return "it supports page_size 1 to 32 for windows with head_dim 256, not 64"
        return found

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        # The public functions return a new tensor. This one writes to a given tensor.
        from flash_attn.cute.interface import _flash_attn_fwd

        self._pool, self._rule, self._run = pool, rule, _flash_attn_fwd

    def prepare(self, step: AttentionStep) -> StepAttention:
        if step.num_decode:
            decode = self._decode(step, captured=False)
            decode.compute_metadata()
            return decode
        parts, first_token = list[tuple[int, StepAttention]](), 0
        for first in range(0, len(step.start), _MOST_PROMPTS):
            part = step.part(first, min(first + _MOST_PROMPTS, len(step.start)))
            parts.append((first_token, _Prompts(self._pool, self._rule, self._run, part)))
            first_token += int(part.lengths.sum())
        return InTurn(parts) if len(parts) > 1 else parts[0][1]

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        return self._decode(step, captured=True)

    def _decode(self, step: AttentionStep, captured: bool) -> "_Decode":
        blocks = BlockTables(self._pool, step, self._rule.window, captured=captured)
        return _Decode(self._pool, self._rule, self._run, blocks)


class _Paged:
    """The arguments that all layers of a step share."""

    def __init__(
        self, pool: KVPool, rule: AttentionRule, run: Callable[..., Any], blocks: BlockTables
    ) -> None:
        self.pool, self.run, self.blocks = pool, run, blocks
        self.options: dict[str, Any] = {
            "seqused_k": blocks.contexts,
            "page_table": blocks.tables,
            "max_seqlen_k": blocks.longest,
            "causal": True,
            "softcap": rule.soft_cap,
            # flash-attn-4 counts the tokens before the token itself.
            "window_size_left": None if rule.window is None else rule.window - 1,
        }


class _Decode(_Paged):
    """Implements DecodeGraphAttention. All requests of the step have the same number of tokens."""

    def compute_metadata(self) -> None:
        self.blocks.compute()

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        shape = (len(self.blocks.contexts), -1, *q.shape[1:])
        tensors = (q.view(shape), *self.pool.layer(layer))
        self.run(*tensors, out=out.view(shape), learnable_sink=sinks, **self.options)


class _Prompts(_Paged):
    """Implements StepAttention for prefill chunks of at most _MOST_PROMPTS requests."""

    def __init__(
        self, pool: KVPool, rule: AttentionRule, run: Callable[..., Any], step: AttentionStep
    ) -> None:
        super().__init__(pool, rule, run, BlockTables(pool, step, rule.window))
        self.blocks.compute()
        # Without a maximum of the query lengths, all steps on Hopper run the same compiled kernel.
        self.options["cu_seqlens_q"] = prefix_sums(step.device_lengths)

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.run(q, *self.pool.layer(layer), out=out, learnable_sink=sinks, **self.options)
