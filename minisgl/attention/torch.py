"""Attention in plain torch. It supports every device and dtype, and is the backend for CPUs.

Tests of the GPU kernels compare with it. Decode requests run as one padded batch; prefill chunks
run one after the other, in blocks of queries.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from minisgl.attention.base import AttentionBackend, AttentionStep, Capabilities, StepAttention
from minisgl.kvcache.pool import KVPool

# The number of queries in one call. It limits the memory of the mask, and of the scores if torch
# has no fused kernel.
_QUERY_BLOCK = 1024


class TorchAttention(AttentionBackend):
    """Computes softmax(q k / sqrt(D)) v by torch's scaled_dot_product_attention.

    The sizes of its tensors depend on the longest context, so a CUDA graph cannot capture it.
    """

    name = "torch"
    capabilities = Capabilities(fp8_kv=True)

    def __init__(self, pool: KVPool, q_heads: int) -> None:
        self._pool = pool

    def prepare(self, step: AttentionStep) -> StepAttention:
        contexts = step.start + step.lengths
        if step.num_decode:
            return self._prepare_decode(step, int(contexts.max()))
        pages = step.page_table[step.device_rows]
        slots = [self._slots(row, int(end)) for row, end in zip(pages, contexts, strict=True)]
        return _PrefillStep(self._pool, step.lengths.tolist(), slots)

    def _prepare_decode(self, step: AttentionStep, longest: int) -> StepAttention:
        each = torch.arange(int(step.lengths[0]), device=step.device_start.device)
        ends = (step.device_start.unsqueeze(1) + each + 1).unsqueeze(2)
        mask = torch.arange(longest, device=ends.device) < ends
        slots = self._slots(step.page_table[step.device_rows], longest)
        # The mask alone is not enough: a masked key has weight zero, and zero times a NaN that
        # another request left in the page is NaN.
        slots = torch.where(mask[:, -1], slots, self._pool.dummy_slot)
        return _DecodeStep(self._pool, slots, mask)

    def _slots(self, pages: Tensor, length: int) -> Tensor:
        """Return the slots [..., length] of positions 0..length-1. pages: [..., max_pages]."""
        size = self._pool.page_size
        used = pages[..., : -(-length // size)].unsqueeze(-1) * size
        offsets = torch.arange(size, device=pages.device, dtype=pages.dtype)
        return (used + offsets).flatten(-2)[..., :length]


class _DecodeStep(NamedTuple):
    """Implements StepAttention for n decode requests with contexts of C tokens or less.

    slots: [n, C], padded with the dummy slot. mask: bool [n, W, C], True for the keys to which each
    of the W tokens of a request attends.
    """

    pool: KVPool
    slots: Tensor
    mask: Tensor

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        keys, values = self.pool.read(layer, self.slots)
        # The query heads that share a KV head are passed as further query rows of that head, and so
        # are the tokens of a request. Keys and values are therefore not repeated.
        (reqs, width, _), kv_heads, dim = self.mask.shape, keys.shape[2], q.shape[2]
        grouped = q.view(reqs, width, kv_heads, -1, dim).transpose(1, 2)
        group = grouped.shape[3]
        k, v = keys.transpose(1, 2), values.transpose(1, 2)
        mask = self.mask.repeat_interleave(group, 1).unsqueeze(1)
        attended = scaled_dot_product_attention(grouped.flatten(2, 3), k, v, attn_mask=mask)
        attended = attended.view(reqs, kv_heads, width, group, dim).transpose(1, 2)
        out[:] = attended.reshape(q.shape)


class _PrefillStep(NamedTuple):
    """Implements StepAttention for prefill chunks.

    lengths: the tokens of each chunk. slots: for each chunk, the slots of its whole context.
    """

    pool: KVPool
    lengths: list[int]
    slots: list[Tensor]

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        chunks, results = torch.split(q, self.lengths), torch.split(out, self.lengths)
        for chunk, result, slots in zip(chunks, results, self.slots, strict=True):
            result[:] = _attend_chunk(chunk, *self.pool.read(layer, slots))


def _attend_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one chunk: q [n, Hq, D], the last n tokens of the context k, v.

    k, v: [C, Hkv, D]. Returns [n, Hq, D].
    """
    start = len(k) - len(q)
    queries, keys, values = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    blocks = []
    for first in range(0, q.shape[0], _QUERY_BLOCK):
        last = min(first + _QUERY_BLOCK, q.shape[0])
        end = start + last  # no query of the block attends to a later key
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
