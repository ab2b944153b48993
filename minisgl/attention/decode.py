"""Decode attention that plans nothing on the host, so that graphs can hold it: two kinds.

Our own kernel gives every multiprocessor the same amount of work, and norms, rotates and stores as
well. FlashInfer with one block for each req and KV head, by a plan that does not depend on the
contexts, has no parts to merge: faster where the blocks fill the GPU more than once.
"""

from typing import Any

import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.kernel import DecodeScratch, balanced_decode, count_blocks, kv_metadata
from minisgl.kvcache.pool import KVPool

_INT_WORKSPACE_BYTES = 2**20  # a plan holds a few int32 for each of some thousand blocks


class BalancedDecode:
    """Implements DecodeGraphAttention and FusedAttention, for steps with prompt tokens as well.

    All may share a scratch that is large enough: steps run one after the other.
    """

    def __init__(self, pool: KVPool, step: AttentionStep, scratch: DecodeScratch) -> None:
        self._pool = pool
        self._table = step.page_table
        self._reqs = (step.device_rows, step.device_start, step.device_lengths)
        self._scratch = scratch

    def describe(self) -> None:
        count_blocks(*self._reqs, len(self._table) - 1, self._scratch)

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        self.attend(layer, q.flatten(1), None, None, 0.0, None, out)

    def attend(
        self,
        layer: int,
        qkv: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        cos_sin: Tensor | None,
        out: Tensor,
    ) -> None:
        norms, pools = (q_weight, k_weight, eps, cos_sin), self._pool.layer(layer)
        balanced_decode(qkv, *norms, *pools, out, self._table, *self._reqs, self._scratch)


class WholeDecode:
    """Implements DecodeGraphAttention for many reqs.

    indices: int32, room for the pages of all reqs; shared by the graphs of all sizes.
    """

    def __init__(
        self,
        flashinfer: Any,
        pool: KVPool,
        workspace: Tensor,
        indices: Tensor,
        step: AttentionStep,
        shape: tuple[int, int, int, int],
        types: dict[str, torch.dtype],
    ) -> None:
        """Plans for good, and blocks the host."""
        self._pool = pool
        self._step = step
        size = len(step.device_rows)
        self._indptr = torch.arange(size + 1, dtype=torch.int32, device=pool.device)
        self._last = torch.ones(size, dtype=torch.int32, device=pool.device)
        self._indices = indices
        self._wrapper: Any = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        own = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrapper.reset_workspace_buffer(workspace, own)
        arguments = (self._indptr, self._indices, self._last, *shape)
        self._wrapper.plan(*arguments, **types, disable_split_kv=True)

    def describe(self) -> None:
        step = self._step
        reqs = (step.device_rows, step.device_start, step.device_lengths)
        outputs = (self._indptr, self._indices, self._last)
        kv_metadata(*reqs, step.page_table, self._pool.page_size, *outputs)

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._wrapper.run(q, self._pool.layer(layer), out=out)
