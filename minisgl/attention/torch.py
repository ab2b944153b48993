"""Attention in plain torch. It runs on every device and dtype, and serves CPUs.

Tests of the GPU kernels compare with it. Decode requests run as one padded batch; prefill chunks
run one after the other, in blocks of queries.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.base import AttentionBackend, AttentionStep, Capabilities, StepAttention
from minisgl.kvcache.pool import KVPool

# Queries of one call. It bounds the memory of the mask, and of the scores if torch has no fused
# kernel.
_QUERY_BLOCK = 1024


class TorchAttention(AttentionBackend):
    """Computes softmax(q k / sqrt(D)) v by torch's scaled_dot_product_attention.

    The sizes of its tensors follow the longest context, so that no CUDA graph can hold it.
    """

    name = "torch"
    capabilities = Capabilities()

    def __init__(self, pool: KVPool, q_heads: int) -> None:
        self._pool = pool

    def prepare(self, step: AttentionStep) -> StepAttention:
        contexts = step.start + step.lengths
        if step.num_decode:
            return self._prepare_decode(step, int(contexts.max()))
        ends = np.cumsum(step.lengths)
        chunks = []
        for i in range(len(step.start)):
            pages = step.page_table.index_select(0, step.device_rows[i : i + 1])[0]
            slots = self._slots(pages, int(contexts[i]))
            first = int(ends[i] - step.lengths[i])
            chunks.append(_Chunk(first, int(ends[i]), int(step.start[i]), slots))
        return _PrefillStep(self._pool, tuple(chunks))

    def _prepare_decode(self, step: AttentionStep, longest: int) -> StepAttention:
        ends = (step.device_start + step.device_lengths).unsqueeze(1)
        mask = torch.arange(longest, device=ends.device) < ends
        slots = self._slots(step.page_table[step.device_rows], longest)
        # The mask alone is not enough: a masked key has weight zero, and zero times a NaN that
        # another request left in the page is NaN.
        slots = torch.where(mask, slots, self._pool.dummy_slot)
        return _DecodeStep(self._pool, slots, mask[:, None, None, :])

    def _slots(self, pages: Tensor, length: int) -> Tensor:
        """Return the slots [..., length] of positions 0..length-1. pages: [..., max_pages]."""
        size = self._pool.page_size
        used = pages[..., : -(-length // size)].unsqueeze(-1) * size
        offsets = torch.arange(size, device=pages.device, dtype=pages.dtype)
        return (used + offsets).flatten(-2)[..., :length]


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeStep:
    """Implements StepAttention for n decode requests with contexts of C tokens or less.

    slots: [n, C], padded with the dummy slot. mask: bool [n, 1, 1, C], False for padding.
    """

    pool: KVPool
    slots: Tensor
    mask: Tensor

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        keys, values = (part.flatten(0, 1)[self.slots] for part in self.pool.layer(layer))
        # The query heads of a KV head run as queries of that head: no key or value is repeated.
        grouped = q.view(len(q), keys.shape[2], -1, q.shape[2])
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        attended = scaled_dot_product_attention(grouped, k, v, attn_mask=self.mask)
        out[:] = attended.reshape(q.shape)


class _Chunk(NamedTuple):
    """One prefill chunk: the step's tokens first..last-1, which begin at position `start`.

    slots: [start + last - first], the slots of the context.
    """

    first: int
    last: int
    start: int
    slots: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillStep:
    """Implements StepAttention for prefill chunks."""

    pool: KVPool
    chunks: tuple[_Chunk, ...]

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        keys, values = (part.flatten(0, 1) for part in self.pool.layer(layer))
        for first, last, start, slots in self.chunks:
            out[first:last] = _attend_chunk(q[first:last], keys[slots], values[slots], start)


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Causal attention of one chunk. q: [n, Hq, D], at positions from `start`; returns [n, Hq, D].

    k, v: [start + n, Hkv, D], the whole context.
    """
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    blocks = []
    for first in range(0, q.shape[0], _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, q.shape[0])
        end = start + last  # no query of the block sees a later key
        causal = torch.ones(last - first, end, dtype=torch.bool, device=q.device)
        block = scaled_dot_product_attention(
            queries[:, :, first:last],
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=causal.tril(start + first),
            enable_gqa=True,
        )
        blocks.append(block.squeeze(0).transpose(0, 1))
    return torch.cat(blocks)
