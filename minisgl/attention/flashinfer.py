"""Attention on CUDA by FlashInfer's wrappers, over the KV pool in its layout (NHD).

Prefill runs FlashInfer's fa3 kernels on Hopper, over a contiguous copy of contexts that many
queries read. It runs the fa2 kernels on other GPUs, for few tokens, and until the fa3 kernels are
compiled. Decode runs minisgl's own kernel or fa2. With an FP8 pool, prefill always runs over
dequantised copies of the contexts, and decode always runs minisgl's kernel. flashinfer is imported
when a backend is created.

Windows, soft caps and sinks: FlashInfer masks the keys before a window and caps the scores, and
minisgl's kernel then applies the sinks (kernel.add_sinks). FlashInfer gets no page behind the
window, because such a page may belong to another request. It counts positions from the end of the
keys, so the pages that are left out change no result. Decode under these rules always runs
minisgl's kernel.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
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
from minisgl.attention.decode import BalancedDecodes, UnsplitDecode, new_tokens
from minisgl.build.flashinfer_jit import compiled
from minisgl.core.batch import Int32Array
from minisgl.kernel.contexts import ContextCopy
from minisgl.kernel.dispatch import add_sinks, gather_kv, kv_metadata
from minisgl.kernel.gather import first_pages
from minisgl.kvcache.pool import KVPool, KVSpec

_MIN_WORKSPACE_BYTES = 128 * 2**20  # the size that FlashInfer's documentation recommends
_MAX_QUERY_ROWS = 128  # query rows of one block of the fa2 kernels
_BLOCKS_PER_MULTIPROCESSOR = 2  # FlashInfer plans for this number
# minisgl's decode kernel is faster than FlashInfer's up to this many waves and this many requests.
# FlashInfer runs one block for each request and KV head. A wave is the number of blocks that the
# GPU runs at the same time.
_MAX_WAVES, _MAX_REQS = 2, 176
# minisgl's decode kernel is always faster with at most this many query heads for each KV head.
_SMALL_GROUP = 2
# fa3 runs up to this many tokens in one block. fa2 splits their context over several blocks.
_FEW_TOKENS = 128


def workspace_bytes(multiprocessors: int, q_heads: int, kv: KVSpec) -> int:
    """Return the size of FlashInfer's float workspace, in bytes.

    The workspace holds the float32 results of split contexts: over all KV heads, at most one part
    for each block. multiprocessors: of the GPU. q_heads, kv: the heads of one rank.
    """
    group = q_heads // kv.kv_heads
    parts = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors * group * _MAX_QUERY_ROWS
    return max(_MIN_WORKSPACE_BYTES, parts * (kv.head_dim + 1) * 4)


class _Planner:
    """One FlashInfer wrapper, planned anew for each step.

    I1  A plan writes into pinned host memory. The GPU copies that memory to the device after the
        steps that were launched before the plan. The next plan overwrites the memory, so it waits
        for the copy first. The copy precedes the planned step, so no plan waits for that step.
    """

    def __init__(self, wrapper: Any) -> None:
        self.wrapper = wrapper
        self._copied: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def plan(self, *args: object, **kwargs: object) -> None:
        self._copied.synchronize()
        self.wrapper.plan(*args, **kwargs)
        self._copied.record()


class FlashInferAttention(AttentionBackend):
    """Attention of both phases. A step's kernels run one by one, so they share a float workspace.

    variant: the FlashInfer kernels for prefill, fa2 or fa3. None: the GPU and the step decide.
    """

    name = "flashinfer"
    capabilities = Capabilities(
        devices=("cuda",),
        dtypes=(torch.bfloat16, torch.float16),
        head_dims=(64, 128, 256),
        features=frozenset(AttentionFeature),
    )
    variant: ClassVar[str | None] = None

    @classmethod
    def obstacle(cls, needs: AttentionNeeds) -> str | None:
        found = super().obstacle(needs)
        if found is None and importlib.util.find_spec("flashinfer") is None:
            return "the package flashinfer is not installed (pip install minisgl[gpu])"
        return found

    @classmethod
    def kernel_variants(cls, decode: bool, archs: Sequence[int]) -> frozenset[str]:
        if decode:
            return frozenset({"fa2"})
        return frozenset(variant for arch in archs for variant in cls._prefill_variants(arch))

    @classmethod
    def _prefill_variants(cls, arch: int) -> tuple[str, str]:
        """The kernels for prefill chunks of few and of many tokens. arch: 90 for Hopper."""
        return cls.variant or "fa2", cls.variant or ("fa3" if arch // 10 == 9 else "fa2")

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        import flashinfer

        self._pool, self._rule = pool, rule
        spec = pool.spec
        self._shape = (q_heads, spec.kv_heads, spec.head_dim, pool.page_size)
        self._types = {"q_data_type": spec.dtype, "kv_data_type": spec.dtype}
        # FlashInfer counts the tokens before the token itself.
        window_left = -1 if rule.window is None else rule.window - 1
        mask = {"causal": True, "window_left": window_left, "logits_soft_cap": rule.soft_cap}
        self._prefill_options = {**self._types, **mask}
        properties = torch.cuda.get_device_properties(pool.device)
        self._blocks = _BLOCKS_PER_MULTIPROCESSOR * properties.multi_processor_count
        size = workspace_bytes(properties.multi_processor_count, q_heads, spec)
        self._workspace = torch.zeros(size, dtype=torch.uint8, device=pool.device)
        major, minor = torch.cuda.get_device_capability(pool.device)
        self._variants = variants = self._prefill_variants(10 * major + minor)
        few, many = (rule.module(variant, spec.dtype, spec.head_dim) for variant in variants)
        self._many_ready = compiled(many) if many != few else lambda: True
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
        self._few, self._many = (
            _Planner(wrapper(self._workspace, "NHD", backend=variant)) for variant in variants
        )
        # Wrappers for contiguous keys, by variant and by group of prompts.
        self._contiguous: dict[tuple[str, int], _Planner] = {}
        pays = ContextCopy.may_pay(rule.window, q_heads // spec.kv_heads)
        self._copies = spec.fp8 or (variants[1] == "fa3" and pays)
        self._copy: ContextCopy | None = None
        self._decodes = BalancedDecodes(pool, q_heads, rule)
        self._graph_indices: Tensor | None = None

    def prepare(self, step: AttentionStep) -> StepAttention:
        if step.num_decode:
            return self._decodes.prepare(step)
        ready = self._many_ready()
        few = int(step.lengths.sum()) <= _FEW_TOKENS or not ready
        prompts = (step.start, step.lengths)
        if self._copies:
            # The first step is part of the warm-up. It copies even if the copy saves no time,
            # because this loads the kernels: those of fa2 if fa3 is not compiled yet.
            is_first = self._copy is None
            if self._copy is None or not self._copy.holds(*prompts):
                self._copy = copy_for(self._pool, step, self._rule.window)
            copy = self._copy
            if self._pool.spec.fp8:
                # An FP8 pool has no other attention, and not all contexts may fit into one copy.
                variant, parts = self._variants[not few], []
                for group, (first, end) in enumerate(copy.groups(*prompts)):
                    attention = self._over(copy, step.part(first, end), variant, group)
                    parts.append((int(step.lengths[:first].sum()), attention))
                return InTurn(parts)
            wanted = not few and copy.pays(*prompts, self._shape[0] // self._shape[1])
            if (wanted or is_first) and copy.fits(*prompts):
                return self._over(copy, step, self._variants[ready], 0)
        planner = self._few if few else self._many
        pages = pages_of(self._pool, step, self._rule.window)
        planner.plan(_prefix_sums(step.lengths), *pages, *self._shape, **self._prefill_options)
        return PagedAttention(self._pool, planner.wrapper.run)

    def _over(
        self, copy: ContextCopy, step: AttentionStep, variant: str, group: int
    ) -> "ContiguousAttention":
        """Plan the attention of one group of prompts over a copy of their contexts."""
        if (variant, group) not in self._contiguous:
            from flashinfer import BatchPrefillWithRaggedKVCacheWrapper as Wrapper

            wrapper: Any = Wrapper(self._workspace, "NHD", backend=variant)
            self._contiguous[variant, group] = _Planner(wrapper)
        planner = self._contiguous[variant, group]
        attention = ContiguousAttention(self._pool, step, copy, planner.wrapper.run)
        planner.plan(*attention.indptrs, *self._shape[:3], **self._prefill_options)
        return attention

    def decode_graph(self, size: int, step: AttentionStep) -> DecodeGraphAttention | None:
        pool, (q_heads, kv_heads) = self._pool, self._shape[:2]
        few = size <= _MAX_REQS and size * kv_heads <= _MAX_WAVES * self._blocks
        # UnsplitDecode takes one token of each request, and has no window, soft cap or sinks.
        few |= new_tokens(step) > 1 or self._rule != PLAIN
        if few or q_heads <= _SMALL_GROUP * kv_heads or pool.spec.fp8:
            return self._decodes.of_step(step)
        if self._graph_indices is None:
            entries = size * step.page_table.shape[1]
            self._graph_indices = torch.zeros(entries, dtype=torch.int32, device=pool.device)
        memory = (self._workspace, self._graph_indices)
        return UnsplitDecode(pool, *memory, step, self._shape, self._types)


class FlashInferFa2(FlashInferAttention):
    """Prefill by the fa2 kernels on every GPU."""

    name = "flashinfer-fa2"
    variant = "fa2"


class FlashInferFa3(FlashInferAttention):
    """Prefill by the fa3 kernels for any number of tokens."""

    name = "flashinfer-fa3"
    variant = "fa3"


class PagedAttention(NamedTuple):
    """Implements StepAttention of a prefill step over the pages of the pool.

    run: the method `run` of a paged wrapper, which is planned for the step.
    """

    pool: KVPool
    run: Callable[..., Any]

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        _attend(self.run, (q, self.pool.layer(layer)), out, sinks)


class ContiguousAttention:
    """Implements StepAttention of a prefill step over a contiguous copy of its contexts.

    All layers copy their keys and values to the same memory.

    run      the method `run` of a ragged wrapper. The caller plans the wrapper with `indptrs`.
    indptrs  the numbers of queries and of keys before each request.
    """

    def __init__(
        self, pool: KVPool, step: AttentionStep, copy: ContextCopy, run: Callable[..., Any]
    ) -> None:
        self._pool = pool
        self._run = run
        self.indptrs = copy.layout(step.start, step.lengths)
        where = (step.device_rows, step.device_start, step.device_lengths, step.page_table)
        self._copy = copy.find(*where, int(self.indptrs[1][-1]))

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        slots, keys, values = self._copy
        gather_kv(*self._pool.layer(layer), slots, keys, values, self._pool.scales(layer))
        _attend(self._run, (q, keys, values), out, sinks)


def _attend(
    run: Callable[..., Any], tensors: tuple[object, ...], out: Tensor, sinks: Tensor | None
) -> None:
    """Call the method `run` of a wrapper. FlashInfer merges the parts of a split context itself.

    Each query token is in one call only, so each sink is added once.
    """
    if sinks is None:
        run(*tensors, out=out)
    else:
        _, lse = run(*tensors, out=out, return_lse=True)
        add_sinks(out, lse, sinks)


def copy_for(pool: KVPool, step: AttentionStep, window: int | None = None) -> ContextCopy:
    """Memory for copies of each context of steps with the page table of `step`.

    With a window, there is room for the contexts of steps with at most as many tokens as `step`.
    """
    longest = step.page_table.shape[1] * pool.page_size
    if window is not None:
        longest = min(longest, int(step.lengths.sum()) + window + pool.page_size)
    return ContextCopy(longest, pool.layer(pool.layers[0])[0], pool.spec.dtype, window)


def pages_of(
    pool: KVPool, step: AttentionStep, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return FlashInfer's description of the contexts of n requests.

    window: that of the layers. The contexts then begin with the first page that a window touches.

    kv_indptr int32 [n + 1] on the host: where each request's page ids begin.
    kv_indices int32 on the device: the page ids of all requests.
    last_page_len int32 [n] on the host: tokens in each request's last page.
    """
    contexts, size = step.start + step.lengths, pool.page_size
    pages = (contexts + (size - 1)) // size
    indptr = _prefix_sums(pages - first_pages(step.start, window, size))
    n, total = len(contexts), int(indptr[-1])
    scratch = torch.empty(2 * n + 1 + total, dtype=torch.int32, device=pool.device)
    on_device, last, indices = scratch[: n + 1], scratch[n + 1 : 2 * n + 1], scratch[-total:]
    rows, start, lengths = step.device_rows, step.device_start, step.device_lengths
    kv_metadata(rows, start, lengths, step.page_table, size, on_device, indices, last, window)
    return indptr, indices, torch.from_numpy(contexts - (pages - 1) * size)


def _prefix_sums(counts: Int32Array) -> Tensor:
    """Return the prefix sums of `counts` [n], from 0 to the total: int32 [n + 1] on the host."""
    sums = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=sums[1:])
    return torch.from_numpy(sums)
