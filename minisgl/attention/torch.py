"""Attention in plain torch. It supports every device and dtype, and is the backend for CPUs.

Tests of the GPU kernels compare with it. Decode requests run as one padded batch; prefill chunks
run one after the other, in blocks of queries.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionFeature,
    AttentionRule,
    AttentionStep,
    Capabilities,
    StepAttention,
)
from minisgl.kvcache.pool import KVPool

# The number of queries in one call. It limits the memory of the mask, and of the scores if torch
# has no fused kernel.
_QUERY_BLOCK = 1024


class TorchAttention(AttentionBackend):
    """Computes softmax(q k / sqrt(D)) v by torch's scaled_dot_product_attention.

    Layers with sinks or soft caps run plain matrix products. A layer with a window reads no key
    before the window of a request's first new token. The sizes of the tensors depend on the longest
    context, so a CUDA graph cannot capture this backend.
    """

    name = "torch"
    capabilities = Capabilities(features=frozenset(AttentionFeature))

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        self._pool = pool
        self._rule = rule

    def prepare(self, step: AttentionStep) -> StepAttention:
        contexts = step.start + step.lengths
        longest = int(contexts.max())
        if step.num_decode:
            return self._prepare_decode(step, longest)
        pool, window = self._pool, self._rule.window or longest
        pages = step.page_table[step.device_rows]
        slots = [
            pool.slots(row, torch.arange(max(0, start - window + 1), end, device=pages.device))
            for row, start, end in zip(pages, step.start.tolist(), contexts.tolist(), strict=True)
        ]
        return _PrefillStep(pool, self._rule, step.lengths.tolist(), slots)

    def _prepare_decode(self, step: AttentionStep, longest: int) -> StepAttention:
        """Plan a step of contexts with at most `longest` tokens."""
        pool, width, window = self._pool, int(step.lengths[0]), self._rule.window or longest
        read = min(longest, window + width - 1)
        each = torch.arange(width, device=step.device_start.device)
        ends = (step.device_start.unsqueeze(1) + each + 1).unsqueeze(2)
        # No token of a request reads a position before `first`.
        first = (ends[:, -1] - read).clamp(min=0)
        positions = first + torch.arange(read, device=ends.device)
        within = positions < ends[:, -1]
        mask = (positions.unsqueeze(1) < ends) & (positions.unsqueeze(1) >= ends - window)
        slots = pool.slots(step.page_table[step.device_rows], torch.where(within, positions, 0))
        # The mask alone is not enough: a masked key has weight zero, and zero times a NaN that
        # another request left in the page is NaN.
        slots = torch.where(within, slots, pool.dummy_slot)
        return _DecodeStep(pool, self._rule, slots, mask)


class _DecodeStep(NamedTuple):
    """Implements StepAttention for n decode requests with contexts of C tokens or less.

    slots: [n, C], padded with the dummy slot. mask: bool [n, W, C], True for the keys to which each
    of the W tokens of a request attends.
    """

    pool: KVPool
    rule: AttentionRule
    slots: Tensor
    mask: Tensor

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        keys, values = self.pool.read(layer, self.slots)
        # The query heads that share a KV head are passed as further query rows of that head, and so
        # are the tokens of a request. Keys and values are therefore not repeated.
        (reqs, width, _), kv_heads, dim = self.mask.shape, keys.shape[2], q.shape[2]
        grouped = q.view(reqs, width, kv_heads, -1, dim).transpose(1, 2)
        group = grouped.shape[3]
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        mask, wide = self.mask.repeat_interleave(group, 1).unsqueeze(1), grouped.flatten(2, 3)
        if sinks is not None:
            sinks = sinks.view(1, kv_heads, group).repeat(1, 1, width)
        attended = _attend(wide, k, v, mask, self.rule.soft_cap, sinks)
        attended = attended.view(reqs, kv_heads, width, group, dim).transpose(1, 2)
        out[:] = attended.reshape(q.shape)


class _PrefillStep(NamedTuple):
    """Implements StepAttention for prefill chunks.

    lengths: the tokens of each chunk. slots: for each chunk, the slots of its context, from the
    first token that the window of the chunk's first token holds.
    """

    pool: KVPool
    rule: AttentionRule
    lengths: list[int]
    slots: list[Tensor]

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        chunks, results = torch.split(q, self.lengths), torch.split(out, self.lengths)
        for chunk, result, slots in zip(chunks, results, self.slots, strict=True):
            attend_chunk(chunk, *self.pool.read(layer, slots), self.rule, sinks, result)


def attend_chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: AttentionRule,
    sinks: Tensor | None,
    out: Tensor,
    *,
    causal: bool = True,
) -> None:
    """Attention of one chunk: q [n, Hq, D], the last n tokens of the context k, v.

    k, v: [C, Hkv, D]. sinks: [Hq] or None. out: [n, Hq, D], overwritten. causal: no token attends
    to a later one; otherwise a window ends with the context.
    """
    start, window = len(k) - len(q), rule.window or len(k)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    if sinks is not None:
        sinks = sinks.view(1, -1, 1)
    for first in range(0, len(q), _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, len(q))
        # No query of the block attends to a key at or past `end`, or before `begin`.
        begin, end = max(0, start + first - window + 1), start + last if causal else len(k)
        ones = torch.ones(last - first, end - begin, dtype=torch.bool, device=q.device)
        own = start + first - begin
        mask = (ones.tril(own) if causal else ones).triu(own - window + 1)
        parts = queries[:, :, first:last], keys[:, :, begin:end], values[:, :, begin:end]
        block = _attend(*parts, mask, rule.soft_cap, sinks)
        out[first:last] = block.squeeze(0).transpose(0, 1)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention by torch's fused kernel; with a soft cap or sinks by matrix products in float32.

    q: [B, H, n, D]; k, v: [B, Hkv, C, D]; mask: bool, broadcast to [B, H, n, C]; sinks: broadcast
    to [B, H, n]. A sink takes a share of the softmax and adds no value. Returns [B, H, n, D].
    """
    group = q.shape[1] // k.shape[1]
    if soft_cap is None and sinks is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=group > 1)
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q.float() @ k.float().transpose(2, 3) / q.shape[-1] ** 0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        last = sinks.float().expand(scores.shape[:3]).unsqueeze(-1)
        scores = torch.cat((scores, last), dim=-1)
    attended: Tensor = scores.softmax(-1)[..., : k.shape[2]] @ v.float()
    return attended.to(q.dtype)
