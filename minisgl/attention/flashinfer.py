"""Attention on CUDA by FlashInfer's wrappers, over the pool as it lies (NHD).

Prefill runs the fa3 kernels on Hopper, over a copy of contexts that many queries read; the fa2
kernels elsewhere and for few tokens; decode our own kernel or fa2. flashinfer is imported here
alone, and only when one of these backends is made.
"""

import importlib.util
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep, DecodeGraphAttention, StepAttention
from minisgl.attention.decode import BalancedDecode, WholeDecode
from minisgl.core import Int32Array
from minisgl.kernel import ContextCopy, DecodeScratch, decode_scratch, gather_kv, kv_metadata
from minisgl.kvcache.pool import KVPool

_HEAD_DIMS = (64, 128, 256)
_MIN_WORKSPACE_BYTES = 128 * 2**20  # what FlashInfer's documentation recommends
_MOST_QUERY_ROWS = 128  # of one block of the fa2 kernels
_BLOCKS_PER_MULTIPROCESSOR = 2  # for which FlashInfer plans
# Our decode kernel is faster than FlashInfer's for up to so many waves of blocks (one for each req
# and KV head) and so many reqs; with so few query heads for a KV head always.
_WAVES, _MOST_REQS, _SMALL_GROUP = 2, 176, 2
_FEW_TOKENS = 128  # fa3 has one block for so many, fa2 also splits their context


def why_not_flashinfer(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashInfer cannot serve a KV pool of this device, dtype and head size; None if it can."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it supports bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return f"it supports head_dim {_HEAD_DIMS}, not {head_dim}"
    if importlib.util.find_spec("flashinfer") is None:
        return "the package flashinfer is not installed (pip install minisgl[gpu])"
    return None


def prefill_variants(name: str, arch: int) -> tuple[str, str]:
    """For few tokens and for many: what the backend's name says, if it does, for both; otherwise
    fa3 for many on Hopper, and fa2. arch: 90 for compute capability 9.0."""
    _, _, variant = name.partition("-")
    if variant:
        return variant, variant
    return "fa2", "fa3" if arch // 10 == 9 else "fa2"


class _Planner:
    """One wrapper that is planned anew for each step.

    I1  A plan writes into pinned memory, which is copied to the device behind earlier steps. So
        the next plan waits for that copy: at most for the step before the one planned last.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, *args: object, **kwargs: object) -> None:
        self._copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        self._copied.record()


class FlashInferAttention:
    """Both phases; they share the float workspace, since a step's kernels run one by one."""

    def __init__(self, pool: KVPool, q_heads: int, variants: tuple[str, str]) -> None:
        """variants: as prefill_variants."""
        import flashinfer

        self._flashinfer: Any = flashinfer
        self._pool = pool
        self._shape = (q_heads, pool.kv_heads, pool.head_dim, pool.page_size)
        self._types = {"q_data_type": pool.dtype, "kv_data_type": pool.dtype}
        properties = torch.cuda.get_device_properties(pool.device)
        self._blocks = _BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
        # parts of split contexts: no more than `blocks` over the KV heads, in float32
        parts = self._blocks * (q_heads // pool.kv_heads) * _MOST_QUERY_ROWS
        size = max(_MIN_WORKSPACE_BYTES, parts * (pool.head_dim + 1) * 4)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=pool.device)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._few, self._many = (
            _Planner(wrapper(self._workspace, "NHD", backend=variant)) for variant in variants
        )
        self._contiguous: _Planner | None = None
        if variants[1] == "fa3":
            ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
            self._contiguous = _Planner(ragged(self._workspace, "NHD", backend="fa3"))
        self._copy: ContextCopy | None = None
        self._scratch: DecodeScratch | None = None
        self._graph_indices: Tensor | None = None

    def prepare(self, step: AttentionStep) -> StepAttention:
        """A step of one phase only (PhasedAttention splits)."""
        if step.num_decode:
            decode = BalancedDecode(self._pool, step, self._scratch_of(step))
            decode.describe()
            return decode
        few, prompts = int(step.lengths.sum()) <= _FEW_TOKENS, (step.start, step.lengths)
        if self._contiguous is not None:
            first = self._copy is None  # a warm-up's, which loads the kernels of this way too
            copy = self._copy = self._copy or ContextCopy(step.page_table, self._pool.layer(0)[0])
            pays = first or (not few and copy.pays(*prompts, self._shape[0] // self._shape[1]))
            if pays and copy.fits(*prompts):
                contexts = CopiedContexts(self._pool, step, copy)
                indptrs = contexts.indptrs
                self._contiguous.plan(*indptrs, *self._shape[:3], causal=True, **self._types)
                return ContiguousAttention(contexts, self._contiguous.wrapper)
        planner = self._few if few else self._many
        where = (_cumulated(step.lengths), *pages_of(self._pool, step))
        planner.plan(*where, *self._shape, causal=True, **self._types)
        return _Planned(self._pool, planner.wrapper)

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        """Of several sizes the largest is to be asked for first: they share buffers."""
        pool, (q_heads, kv_heads) = self._pool, self._shape[:2]
        few = size <= _MOST_REQS and size * kv_heads <= _WAVES * self._blocks
        if few or q_heads <= _SMALL_GROUP * kv_heads:
            return BalancedDecode(pool, step, self._scratch_of(step))
        if self._graph_indices is None:
            entries = size * step.page_table.shape[1]
            self._graph_indices = torch.zeros(entries, dtype=torch.int32, device=pool.device)
        arguments = (self._flashinfer, pool, self._workspace, self._graph_indices)
        return WholeDecode(*arguments, step, self._shape, self._types)

    def _scratch_of(self, step: AttentionStep) -> DecodeScratch:
        if self._scratch is None:
            self._scratch = scratch_for(step, *self._shape[:3])
        return self._scratch


class _Planned:
    """Implements StepAttention by a planned wrapper."""

    def __init__(self, pool: KVPool, wrapper: Any) -> None:
        self._pool = pool
        self._wrapper = wrapper

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        self._wrapper.run(q, self._pool.layer(layer), out=out)


class CopiedContexts:
    """A contiguous copy of the keys and values of a prefill step's contexts, layer by layer.

    indptrs  where each request's queries and keys begin, as the ragged wrapper plans with them.
    """

    def __init__(self, pool: KVPool, step: AttentionStep, copy: ContextCopy) -> None:
        self._pool = pool
        self.indptrs = copy.layout(step.start, step.lengths)
        where = (step.device_rows, step.device_start, step.device_lengths, step.page_table)
        self._copy = copy.find(*where, pool.page_size, int(self.indptrs[1][-1]))

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Copy this layer's keys and values. The next call overwrites the tensors it returns."""
        slots, keys, values = self._copy
        gather_kv(*self._pool.layer(layer), slots, keys, values)
        return keys, values


class ContiguousAttention:
    """Implements StepAttention by a ragged wrapper that was planned for the contexts' indptrs."""

    def __init__(self, contexts: CopiedContexts, wrapper: Any) -> None:
        self._contexts = contexts
        self._wrapper = wrapper

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        keys, values = self._contexts.gather(layer)
        self._wrapper.run(q, keys, values, out=out)


def scratch_for(step: AttentionStep, q_heads: int, kv_heads: int, head_dim: int) -> DecodeScratch:
    """Decode scratch for as many requests as the page table has rows, without the padding row."""
    rows = len(step.page_table) - 1
    return decode_scratch(rows, q_heads, kv_heads, head_dim, step.page_table.device)


def pages_of(pool: KVPool, step: AttentionStep) -> tuple[Tensor, Tensor, Tensor]:
    """Where the contexts of n reqs lie: kv_indptr [n + 1] on the host, the page ids of all of them
    on the device, last_page_len [n] on the host."""
    contexts, size = step.start + step.lengths, pool.page_size
    pages = (contexts + (size - 1)) // size
    indptr = _cumulated(pages)
    n, total = len(contexts), int(indptr[-1])
    scratch = torch.empty(2 * n + 1 + total, dtype=torch.int32, device=pool.device)
    on_device, last, indices = scratch[: n + 1], scratch[n + 1 : 2 * n + 1], scratch[-total:]
    rows, start, lengths = step.device_rows, step.device_start, step.device_lengths
    kv_metadata(rows, start, lengths, step.page_table, size, on_device, indices, last)
    return indptr, indices, torch.from_numpy(contexts - (pages - 1) * size)


def _cumulated(counts: Int32Array) -> Tensor:
    """int32 [n + 1] on the host: the exclusive sum, and the total."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return torch.from_numpy(sums)
