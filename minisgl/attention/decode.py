"""Decode attention that plans nothing on the host, so that CUDA graphs can capture it.

There are two kinds. BalancedDecode runs minisgl's own kernel: it gives every multiprocessor the
same amount of work, and also normalises, rotates and stores the new token. UnsplitDecode runs
FlashInfer with one block for each request and KV head. Its plan does not depend on the contexts.
It has no partial results to merge. It is therefore faster when there are more thread blocks
(requests times KV heads) than the GPU runs at the same time.
"""

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import PLAIN, AttentionRule, AttentionStep, FusedAttention, NormRope
from minisgl.kernel.decode import DecodeScratch, decode_scratch
from minisgl.kernel.dispatch import balanced_decode, kv_metadata
from minisgl.kvcache.pool import KVPool

# Room for a plan: a few int32 values for each of several thousand blocks.
_INT_WORKSPACE_BYTES = 2**20


class BalancedDecode(FusedAttention):
    """Implements DecodeGraphAttention.

    Requests may have several new tokens (core.Batch.lengths).
    scratch: temporary device memory, large enough for all requests. Steps run one after the other,
    so that all instances for layers of one rule may share one scratch.
    """

    def __init__(
        self,
        pool: KVPool,
        step: AttentionStep,
        scratch: DecodeScratch,
        rule: AttentionRule = PLAIN,
    ) -> None:
        self._pool = pool
        self._rule = rule
        self._table = step.page_table
        self._reqs = (step.device_rows, step.device_start, step.device_lengths)
        self._deltas = step.device_deltas
        self._scratch = scratch
        self._queries = new_tokens(step)

    def compute_metadata(self) -> None:
        from minisgl.kernel.triton.decode_blocks import count_blocks  # needs Triton

        step, fp8 = (*self._reqs, len(self._table) - 1), self._pool.spec.fp8
        count_blocks(*step, self._scratch, fp8, self._queries, self._rule.window)

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.attend(layer, q.flatten(1), None, out, sinks)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        heads: NormRope | None,
        out: Tensor,
        sinks: Tensor | None = None,
    ) -> None:
        """As FusedAttention.attend. heads: None if `qkv` holds only queries, already rotated."""
        q_weight, k_weight, eps, cos_sin = heads or (None, None, 0.0, None)
        norms, pools = (q_weight, k_weight, eps, cos_sin), self._pool.layer(layer)
        step, scales = (self._table, *self._reqs), self._pool.scales(layer)
        inputs = (qkv, *norms, *pools, out, *step, self._scratch, scales, self._queries)
        balanced_decode(*inputs, sinks, self._rule.window, self._rule.soft_cap, self._deltas)


def new_tokens(step: AttentionStep) -> int:
    """Return the number of new tokens per request for which the kernel is compiled.

    It is a power of two, and at least the largest number of new tokens of a request of the step.
    """
    return 1 << (int(step.lengths.max()) - 1).bit_length()


class BalancedDecodes:
    """Makes the BalancedDecode of each step for the layers of one rule. All share one scratch."""

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        """q_heads: query heads of this rank."""
        self._pool, self._q_heads, self._rule = pool, q_heads, rule
        self._scratch: DecodeScratch | None = None
        self._most = 0  # new tokens of a request for which the scratch has room

    def of_step(self, step: AttentionStep) -> BalancedDecode:
        """Return the attention of a decode step. The caller computes its metadata.

        The first step allocates the scratch: for as many requests as the page table has rows,
        without the padding row. A step whose requests have more new tokens allocates a larger one.
        """
        spec, new = self._pool.spec, new_tokens(step)
        # A graph keeps the scratch of its capture alive, even if a larger one replaces it here.
        if self._scratch is None or self._most < new:
            sizes = (len(step.page_table) - 1, self._q_heads, spec.kv_heads, spec.head_dim)
            self._scratch, self._most = decode_scratch(*sizes, step.page_table.device, new), new
        return BalancedDecode(self._pool, step, self._scratch, self._rule)

    def prepare(self, step: AttentionStep) -> BalancedDecode:
        """Return the attention of a decode step, with its metadata."""
        decode = self.of_step(step)
        decode.compute_metadata()
        return decode


class UnsplitDecode:
    """Implements DecodeGraphAttention for many requests, by FlashInfer without split contexts.

    Its layers have no window, no soft cap and no sinks.
    indices: int32, room for the page ids of all requests. Graphs of all sizes share it.
    shape: query heads, KV heads, head size and page size.
    """

    def __init__(
        self,
        pool: KVPool,
        workspace: Tensor,
        indices: Tensor,
        step: AttentionStep,
        shape: tuple[int, int, int, int],
        types: dict[str, torch.dtype],
    ) -> None:
        """Plan once for all steps. Blocks the host."""
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

        wrapper: Any = Wrapper(workspace, "NHD", use_tensor_cores=True)
        self._pool, self._wrapper, self._step = pool, wrapper, step
        size = len(step.device_rows)
        self._indptr = torch.arange(size + 1, dtype=torch.int32, device=pool.device)
        self._last = torch.ones(size, dtype=torch.int32, device=pool.device)
        self._indices = indices
        plan_workspace = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        wrapper.reset_workspace_buffer(workspace, plan_workspace)
        arguments = (self._indptr, self._indices, self._last, *shape)
        wrapper.plan(*arguments, **types, disable_split_kv=True)

    def compute_metadata(self) -> None:
        step = self._step
        reqs = (step.device_rows, step.device_start, step.device_lengths)
        outputs = (self._indptr, self._indices, self._last)
        kv_metadata(*reqs, step.page_table, self._pool.page_size, *outputs)

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self._wrapper.run(q, self._pool.layer(layer), out=out)
