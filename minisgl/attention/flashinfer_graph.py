"""FlashInfer decode inside a CUDA graph: fixed buffers, whose contents the graph itself computes.

Two kinds, by the number of reqs. Few: long contexts are split over the blocks that would stand
idle, which FlashInfer plans on the host before each replay. Many: one block per req and KV head,
a plan that does not depend on the contexts; it is made once, and a replay costs the host nothing.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.core import Int32Array
from minisgl.kernel import kv_metadata
from minisgl.kvcache.pool import KVPool

_INT_WORKSPACE_BYTES = 2**20  # a plan holds a few int32 for each of some thousand blocks


class _FixedDecode(ABC):
    """Buffers and metadata common to both kinds; implements DecodeGraphAttention but for plan.

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
        self.flashinfer = flashinfer
        self.pool = pool
        self.step = step
        self.shape = shape
        self.types = types
        size = len(step.device_rows)
        self.indptr = torch.arange(size + 1, dtype=torch.int32, device=pool.device)
        self.last = torch.ones(size, dtype=torch.int32, device=pool.device)
        self.indices = indices
        self.wrapper: Any = self.make_wrapper(workspace)
        # each has its own: its pinned twin is read later, and WholeDecode's content is for good
        own = torch.zeros(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self.wrapper.reset_workspace_buffer(workspace, own)

    @abstractmethod
    def make_wrapper(self, workspace: Tensor) -> Any:
        """FlashInfer's wrapper over the buffers of this graph."""

    def describe(self) -> None:
        step = self.step
        rows, start, lengths = step.device_rows, step.device_start, step.device_lengths
        size = self.pool.page_size
        outputs = (self.indptr, self.indices, self.last)
        kv_metadata(rows, start, lengths, step.page_table, size, *outputs)

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        self.wrapper.run(q, self.pool.layer(layer), out=out)


class SplitDecode(_FixedDecode):
    """For few reqs: planned before each replay.

    I1  As _Planner's in flashinfer_backend: a plan waits for the copy of the plan before.
    """

    def make_wrapper(self, workspace: Tensor) -> Any:
        self._copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._planned = False
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self.indptr,
            paged_kv_indices_buffer=self.indices,
            paged_kv_last_page_len_buffer=self.last,
        )

    def plan(self, start: Int32Array) -> None:
        size = self.pool.page_size
        pages = start // size + 1
        sums = np.zeros(len(start) + 1, dtype=np.int32)
        np.cumsum(pages, out=sums[1:])
        indptr, last = torch.from_numpy(sums), torch.from_numpy(start % size + 1)
        arguments = (indptr, self.indices[: int(sums[-1])], last, *self.shape)
        self._copied.synchronize()  # I1
        if self._planned:  # leaves the device's indptr and last_page_len to describe()
            self.flashinfer.fast_decode_plan(
                self.wrapper, *arguments, **self.types, global_override_indptr_cpu=indptr
            )
        else:
            self.wrapper.plan(*arguments, **self.types)
            self._planned = True
        self._copied.record()


class WholeDecode(_FixedDecode):
    """For many reqs: planned once, over buffers on the device, without splitting."""

    def make_wrapper(self, workspace: Tensor) -> Any:
        self._planned = False
        return self.flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )

    def plan(self, start: Int32Array) -> None:
        """Blocks the host the first time, before the capture; nothing to do later."""
        if not self._planned:
            arguments = (self.indptr, self.indices, self.last, *self.shape)
            self.wrapper.plan(*arguments, **self.types, disable_split_kv=True)
            self._planned = True
