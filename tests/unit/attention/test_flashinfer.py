"""The FlashInfer backend against the torch backend, with a stand-in for FlashInfer's wrappers.

The stand-in computes in torch the prefill that FlashInfer documents: causal attention whose
positions count from the end of the keys, window_left, logits_soft_cap, and logarithms to base 2.
tests/gpu runs FlashInfer itself.
"""

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    FusedAttention,
    InTurn,
)
from minisgl.attention.flashinfer import (
    ContiguousAttention,
    FlashInferAttention,
    PagedAttention,
)
from minisgl.attention.registry import attention_kernels
from minisgl.attention.torch import TorchAttention
from minisgl.build.flashinfer_jit import AttentionKernel
from minisgl.kernel.fp8 import store_kv
from minisgl.kernel.gather import first_pages
from minisgl.kvcache.pool import KVPool, KVSpec
from tests.examples import examples

CPU = torch.device("cpu")
Q_HEADS, KV_HEADS, DIM, ROWS = 4, 2, 64, 6
GPU = AttentionNeeds(torch.device("cuda"), torch.bfloat16, 64, page_size=16)


class Wrapper:
    """The base of both wrappers.

    kernels: the modules that plans have loaded. fa3_compiled: whether fa3's modules are compiled.
    """

    kernels: set[AttentionKernel]
    queries: Tensor
    fa3_compiled = True

    def __init__(self, workspace: Tensor, layout: str, backend: str) -> None:
        assert layout == "NHD"
        self.variant = backend

    def masked(
        self, causal: bool, window_left: int, logits_soft_cap: float | None, **types: torch.dtype
    ) -> None:
        assert causal
        assert types == {"q_data_type": torch.float32, "kv_data_type": torch.float32}
        self.window_left, self.cap = window_left, logits_soft_cap or 0.0
        kernel = AttentionKernel(self.variant, GPU.dtype, DIM, window_left >= 0, self.cap > 0)
        self.kernels.add(kernel)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [n, Hq, D] of one request and the logarithms [n, Hq]."""
        k, v = (part.repeat_interleave(Q_HEADS // KV_HEADS, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(DIM)
        if self.cap:
            scores = self.cap * torch.tanh(scores / self.cap)
        position = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q)
        key = torch.arange(len(k))
        hidden = key > position
        if self.window_left >= 0:
            hidden |= key + self.window_left < position
        scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
        out = torch.einsum("qhk,khd->qhd", scores.softmax(-1), v)
        return out, scores.logsumexp(-1) / math.log(2)

    def run_over(
        self, q: Tensor, contexts: list[tuple[Tensor, Tensor]], out: Tensor, return_lse: bool
    ) -> object:
        sizes = self.queries.diff().tolist()
        parts = [
            self.attend(part, *context)
            for part, context in zip(torch.split(q, sizes), contexts, strict=True)
        ]
        results, logarithms = (torch.cat(each) for each in zip(*parts, strict=True))
        out.copy_(results)
        return (out, logarithms) if return_lse else out


class Paged(Wrapper):
    def plan(
        self,
        queries: Tensor,
        indptr: Tensor,
        indices: Tensor,
        last: Tensor,
        q_heads: int,
        kv_heads: int,
        dim: int,
        page_size: int,
        **masks: Any,
    ) -> None:
        assert (q_heads, kv_heads, dim) == (Q_HEADS, KV_HEADS, DIM)
        assert len(indices) == indptr[-1]
        self.queries, self.last = queries, last
        self.pages = torch.split(indices.long(), indptr.diff().tolist())
        self.page_size = page_size
        self.masked(**masks)

    def run(
        self, q: Tensor, pool: tuple[Tensor, Tensor], out: Tensor, return_lse: bool = False
    ) -> object:
        contexts = []
        for pages, last in zip(self.pages, self.last.tolist(), strict=True):
            end = (len(pages) - 1) * self.page_size + last
            k, v = (part[pages].flatten(0, 1)[:end] for part in pool)
            contexts.append((k, v))
        return self.run_over(q, contexts, out, return_lse)


class Ragged(Wrapper):
    def plan(
        self,
        queries: Tensor,
        indptr: Tensor,
        q_heads: int,
        kv_heads: int,
        dim: int,
        **masks: Any,
    ) -> None:
        assert (q_heads, kv_heads, dim) == (Q_HEADS, KV_HEADS, DIM)
        self.queries, self.keys = queries, indptr
        self.masked(**masks)

    def run(
        self, q: Tensor, keys: Tensor, values: Tensor, out: Tensor, return_lse: bool = False
    ) -> object:
        sizes = self.keys.diff().tolist()
        contexts = list(zip(torch.split(keys, sizes), torch.split(values, sizes), strict=True))
        return self.run_over(q, contexts, out, return_lse)


@pytest.fixture(scope="module", params=[80, 90], ids=["ampere", "hopper"])
def arch(request: pytest.FixtureRequest) -> Any:
    """The architecture of the GPU for which the backend chooses kernels. Its tensors are here."""
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    wrappers = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=Paged, BatchPrefillWithRaggedKVCacheWrapper=Ragged
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda module: module)
        patch.setitem(sys.modules, "flashinfer", wrappers)
        patch.setattr(torch.cuda, "Event", lambda: event)
        patch.setattr(
            torch.cuda,
            "get_device_properties",
            lambda device: SimpleNamespace(multi_processor_count=1),
        )
        capability = divmod(request.param, 10)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr("minisgl.attention.flashinfer._MIN_WORKSPACE_BYTES", 1)
        patch.setattr(
            "minisgl.attention.flashinfer.compiled",
            lambda kernel: lambda: kernel.variant == "fa2" or Wrapper.fa3_compiled,
        )
        yield request.param


RULES = st.builds(
    AttentionRule,
    window=st.one_of(st.none(), st.sampled_from([1, 2, 9, 64, 200, 1000])),
    soft_cap=st.sampled_from([None, 1.5]),
    sinks=st.booleans(),
)
# The cached tokens and the new tokens of each prompt.
PROMPTS = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 400)),
        st.one_of(st.integers(1, 9), st.integers(1, 300)),
    ),
    min_size=1,
    max_size=ROWS,
)


@settings(max_examples=examples(60))
@given(
    rule=RULES,
    prompts=PROMPTS,
    page_size=st.sampled_from([1, 4, 16, 64]),
    fp8=st.booleans(),
    fa3_compiled=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_prefill_equals_the_torch_backend(
    rule: AttentionRule,
    prompts: list[tuple[int, int]],
    page_size: int,
    fp8: bool,
    fa3_compiled: bool,
    seed: int,
    arch: int,
) -> None:
    """All pages that a layer does not need hold NaN. Stale entries of the page table name them.

    The wrappers load only modules that a start compiles. Until the fa3 modules are compiled, they
    load those of fa2.
    """
    Wrapper.kernels = set()
    Wrapper.fa3_compiled = fa3_compiled
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    start, lengths = np.array(prompts, dtype=np.int32).T
    columns = -(-700 // page_size)
    spec = KVSpec(KV_HEADS, DIM, torch.float32, fp8)
    pool = KVPool(spec, layers=(3,), num_pages=ROWS * columns, page_size=page_size, device=CPU)
    scales = pool.scales(3)
    for part in pool.layer(3):
        part.view(torch.uint8).fill_(0xFF)
    if scales is not None:
        scales.fill_(torch.nan)
    order = torch.from_numpy(rng.permutation(ROWS * columns).astype(np.int32))
    table = torch.cat((order.view(ROWS, columns), torch.full((1, columns), pool.dummy_page)))
    table = table.to(torch.int32)
    rows = torch.from_numpy(rng.permutation(ROWS)[: len(start)].astype(np.int32))
    firsts = first_pages(start, rule.window, page_size)
    for row, first, end in zip(rows, firsts, start + lengths, strict=True):
        positions = torch.arange(int(first) * page_size, int(end))
        own = table[int(row), positions // page_size] * page_size + positions % page_size
        k, v = torch.randn(2, len(positions), KV_HEADS, DIM, generator=generator)
        store_kv(*pool.layer(3), k, v, own, scales)
    counts = torch.from_numpy(start), torch.from_numpy(lengths)
    step = AttentionStep(0, start, lengths, rows, counts[0], counts[1], table)
    q = torch.randn(int(lengths.sum()), Q_HEADS, DIM, generator=generator)
    sinks = torch.randn(Q_HEADS, generator=generator) * 3 if rule.sinks else None
    outputs = []
    backend = FlashInferAttention(pool, Q_HEADS, rule)
    attentions = [each.prepare(step) for each in (TorchAttention(pool, Q_HEADS, rule), backend)]
    attentions.append(backend.prepare(step))  # the first step copies more often than the others
    for attention in attentions:
        outputs.append(torch.full_like(q, torch.nan))
        attention.forward(3, q, outputs[-1], sinks)
    for found in outputs[1:]:
        torch.testing.assert_close(found, outputs[0], atol=1e-5, rtol=1e-4)
    assert isinstance(attentions[1], InTurn) == fp8
    if not fp8:
        pays = rule.window is None or rule.window * 2 >= 1700
        copied = arch == 90 and pays
        assert isinstance(attentions[1], ContiguousAttention if copied else PagedAttention)
    needs = GPU._replace(rules=frozenset({rule}))
    assert set(attention_kernels("flashinfer", [needs], [arch])) >= Wrapper.kernels
    assert fa3_compiled or {kernel.variant for kernel in Wrapper.kernels} == {"fa2"}


def test_a_copy_for_a_window_grows_with_the_step(
    arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An FP8 pool has no attention without a copy, so its copy has to hold every prompt."""
    Wrapper.kernels = set()
    monkeypatch.setattr("minisgl.kernel.contexts._FEWEST_KEYS", 128)
    spec = KVSpec(KV_HEADS, DIM, torch.float32, fp8=True)
    pool = KVPool(spec, layers=(0,), num_pages=300, page_size=4, device=CPU)
    backend = FlashInferAttention(pool, Q_HEADS, AttentionRule(window=10))
    table = torch.arange(300, dtype=torch.int32).repeat(2, 1)
    groups = []
    for chunk in (50, 500, 1, 900):
        start, lengths = np.array([[200], [chunk]], dtype=np.int32)
        row, first, count = (torch.tensor([n], dtype=torch.int32) for n in (0, 200, chunk))
        step = AttentionStep(0, start, lengths, row, first, count, table)
        attention = backend.prepare(step)
        assert isinstance(attention, InTurn)
        groups.append(attention.parts)
        q = torch.zeros(chunk, Q_HEADS, DIM)
        attention.forward(0, q, torch.full_like(q, torch.nan))
    assert [len(group) for group in groups] == [1, 1, 1, 1]


def test_decode_under_rules_always_runs_the_fused_kernel(arch: int) -> None:
    """FlashInfer's decode kernel, which runs for many requests, has no windows and no sinks."""
    spec = KVSpec(KV_HEADS, DIM, torch.float32)
    pool = KVPool(spec, layers=(0,), num_pages=1, page_size=4, device=CPU)
    ones, table = torch.ones(300, dtype=torch.int32), torch.zeros((301, 1), dtype=torch.int32)
    counts = np.ones(300, dtype=np.int32)
    step = AttentionStep(300, counts, counts, ones, ones, ones, table)
    for rule in (AttentionRule(window=2), AttentionRule(sinks=True), AttentionRule(soft_cap=1.0)):
        captured = FlashInferAttention(pool, 8 * KV_HEADS, rule).decode_graph(300, step)
        assert isinstance(captured, FusedAttention)


@pytest.mark.parametrize(
    ("rules", "archs", "names"),
    [
        ([PLAIN], [90], ["fa2 bfloat16 64", "fa3 bfloat16 64"]),
        ([PLAIN], [80], ["fa2 bfloat16 64"]),
        ([AttentionRule(sinks=True)], [90], ["fa2 bfloat16 64", "fa3 bfloat16 64"]),
        (
            [AttentionRule(window=8, sinks=True), AttentionRule(sinks=True)],
            [90],
            [f"{each} bfloat16 64{mask}" for each in ("fa2", "fa3") for mask in ("", " window")],
        ),
        (
            [AttentionRule(window=8, soft_cap=5.0), AttentionRule(soft_cap=5.0)],
            [80, 89],
            ["fa2 bfloat16 64 soft_cap", "fa2 bfloat16 64 window soft_cap"],
        ),
        ([AttentionRule(window=8)], [80, 90], ["fa2 bfloat16 64 window", "fa3 bfloat16 64 window"]),
    ],
)
def test_a_start_compiles_the_modules_of_its_rules(
    rules: list[AttentionRule], archs: list[int], names: list[str], arch: int
) -> None:
    needs = GPU._replace(rules=frozenset(rules))
    kernels = attention_kernels("auto", [needs], archs)
    assert [str(kernel) for kernel in kernels] == names
    assert attention_kernels("torch", [needs], archs) == []


def test_decode_alone_compiles_modules_for_plain_rules_only(arch: int) -> None:
    found = [
        attention_kernels("torch,flashinfer", [GPU._replace(rules=frozenset({rule}))], [90])
        for rule in (PLAIN, AttentionRule(window=8), AttentionRule(sinks=True))
    ]
    assert found == [[AttentionKernel("fa2", torch.bfloat16, 64)], [], []]
