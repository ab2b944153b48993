"""The backends trtllm and flash-attention against the torch backend, with stand-ins for packages.

The stand-ins compute in torch the functions that FlashInfer 0.7 and flash-attn-4 document, from the
arguments that the backends pass. tests/gpu runs the packages themselves.
"""

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packaging.requirements import Requirement
from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    FusedAttention,
    InTurn,
)
from minisgl.attention.flash_attention import FlashAttention
from minisgl.attention.flashinfer import FlashInferAttention
from minisgl.attention.registry import (
    attention_kernels,
    create_attention_backend,
    resolve_phases,
)
from minisgl.attention.torch import TorchAttention
from minisgl.attention.triton import TritonAttention
from minisgl.attention.trtllm import TrtllmAttention
from minisgl.core import ConfigError
from minisgl.kernel.fp8 import store_kv
from minisgl.kernel.gather import first_pages
from minisgl.kvcache.pool import KVPool, KVSpec
from tests.examples import examples

CPU = torch.device("cpu")
GPU = AttentionNeeds(torch.device("cuda"), torch.bfloat16, 128, page_size=16)
Q_HEADS, KV_HEADS, DIM, ROWS, LONGEST = 4, 2, 64, 6, 400


def over_pages(
    queries: list[Tensor],
    keys_values: tuple[Tensor, Tensor],
    tables: Tensor,
    contexts: Tensor,
    window_left: int,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Causal attention of each request, whose queries are the last tokens of its context."""
    outputs = []
    for q, pages, context in zip(queries, tables, contexts.tolist(), strict=True):
        used = pages[: -(-context // keys_values[0].shape[1])].long()
        k, v = (part[used].flatten(0, 1)[:context] for part in keys_values)
        k, v = (part.repeat_interleave(Q_HEADS // KV_HEADS, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        distance = torch.arange(context - len(q), context).unsqueeze(1) - torch.arange(context)
        hidden = (distance < 0) | ((window_left >= 0) & (distance > window_left))
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), -1)
        weights = scores.softmax(-1)[..., :context]
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def xqa(q: Tensor, cache: Any, *, out: Tensor, sinks: Tensor | None, **given: Any) -> None:
    """One token of each request. kv_layout NHD; the scales are those of plain attention."""
    assert given["kv_layout"] == "NHD"
    assert (given["bmm1_scale"], given["bmm2_scale"]) == (DIM**-0.5, 1.0)
    assert not given["workspace_buffer"].any()
    assert sinks is None or sinks.dtype == torch.float32
    # XQA computes the row stride of the table as max_seq_len / page size.
    assert given["max_seq_len"] == given["block_tables"].shape[1] * cache[0].shape[1]
    where = given["block_tables"], given["seq_lens"], given["window_left"]
    out.copy_(over_pages(list(q.unsqueeze(1)), cache, *where, None, sinks))


def context(q: Tensor, cache: Any, *, out: Tensor, sinks: Tensor | None, **given: Any) -> None:
    """FlashInfer's trtllm_batch_context_with_kv_cache."""
    assert given["kv_layout"] == "NHD"
    lengths = given["cum_seq_lens_q"].diff()
    assert int(lengths.max()) == given["max_q_len"]
    assert len(lengths) == given["batch_size"]
    assert given["cum_seq_lens_kv"].diff().tolist() == given["seq_lens"].tolist()
    assert int(given["seq_lens"].max()) <= given["max_kv_len"]
    where = given["block_tables"], given["seq_lens"], given["window_left"]
    queries = list(torch.split(q, lengths.tolist()))
    out.copy_(over_pages(queries, cache, *where, None, sinks))


def flash(q: Tensor, k: Tensor, v: Tensor, *, out: Tensor, **given: Any) -> None:
    """flash-attn-4's forward pass over pages."""
    assert given["causal"]
    starts = given.get("cu_seqlens_q")
    queries = list(q) if starts is None else list(torch.split(q, starts.diff().tolist()))
    assert len(queries) <= 256
    left, contexts = given["window_size_left"], given["seqused_k"]
    assert int(contexts.max()) <= given["max_seqlen_k"]
    where = given["page_table"], contexts, -1 if left is None else left
    found = over_pages(queries, (k, v), *where, given["softcap"], given["learnable_sink"])
    out.copy_(found.view(out.shape))


class Other(TorchAttention):
    """FlashInferAttention's stand-in: computes in torch, and counts its steps."""

    steps = 0

    def prepare(self, step: AttentionStep) -> Any:
        Other.steps += 1
        return super().prepare(step)

    @classmethod
    def kernel_variants(cls, decode: bool, archs: Any) -> frozenset[str]:
        return frozenset({"fa2"} if archs else ())


@pytest.fixture(scope="module", params=[90, 100], ids=["hopper", "blackwell"])
def arch(request: pytest.FixtureRequest) -> Any:
    """The GPU for which the backends choose functions. Their tensors are on the CPU."""
    decode = SimpleNamespace(
        xqa_batch_decode_with_kv_cache=xqa, trtllm_batch_decode_with_kv_cache=xqa
    )
    prefill = SimpleNamespace(trtllm_batch_context_with_kv_cache=context)
    interface = SimpleNamespace(_flash_attn_fwd=flash)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer.decode", decode)
        patch.setitem(sys.modules, "flashinfer.prefill", prefill)
        patch.setitem(sys.modules, "flash_attn.cute.interface", interface)
        patch.setattr("minisgl.attention.trtllm.FlashInferAttention", Other)
        patch.setattr("minisgl.attention.trtllm._WORKSPACE_BYTES", 8)
        patch.setattr("minisgl.attention.trtllm._XQA_WORKSPACE_BYTES", 8)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        capability = divmod(request.param, 10)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        patch.setattr("minisgl.build.versions.version", lambda package: "4.1")
        yield request.param


class Scene:
    """A pool of NaN with the keys of requests, and a page table with stale entries."""

    def __init__(self, rule: AttentionRule, reqs: list[tuple[int, int]], size: int) -> None:
        generator = torch.Generator().manual_seed(len(reqs) + size)
        self.rule, columns = rule, -(-2 * LONGEST // size)
        spec = KVSpec(KV_HEADS, DIM, torch.float32)
        pages = ROWS * columns
        self.pool = KVPool(spec, layers=(3,), num_pages=pages, page_size=size, device=CPU)
        for part in self.pool.layer(3):
            part.fill_(torch.nan)
        self.pool.clear_dummy()
        table = torch.randperm(pages, generator=generator).int().view(ROWS, columns)
        self.table = torch.cat((table, torch.full((1, columns), self.pool.dummy_page).int()))
        self.rows = torch.randperm(ROWS, generator=generator)[: len(reqs)].int()
        self.start, self.lengths = np.array(reqs, dtype=np.int32).T.copy()
        firsts = first_pages(self.start, rule.window, size)
        for row, first, end in zip(self.rows, firsts, self.start + self.lengths, strict=True):
            positions = torch.arange(int(first) * size, int(end))
            slots = self.table[int(row), positions // size] * size + positions % size
            k, v = torch.randn(2, len(positions), KV_HEADS, DIM, generator=generator)
            store_kv(*self.pool.layer(3), k, v, slots)
        self.q = torch.randn(int(self.lengths.sum()), Q_HEADS, DIM, generator=generator)
        self.sinks = torch.randn(Q_HEADS, generator=generator) * 3 if rule.sinks else None

    def step(self, num_decode: int) -> AttentionStep:
        counts = torch.from_numpy(self.start), torch.from_numpy(self.lengths)
        host = self.start, self.lengths
        return AttentionStep(num_decode, *host, self.rows, *counts, self.table)

    def attended(self, attention: Any) -> Tensor:
        out = torch.full_like(self.q, torch.nan)
        attention.forward(3, self.q, out, self.sinks)
        return out

    def check(self, kind: type[AttentionBackend], num_decode: int, found: Any = None) -> None:
        step = self.step(num_decode)
        found = kind(self.pool, Q_HEADS, self.rule).prepare(step) if found is None else found
        expected = TorchAttention(self.pool, Q_HEADS, self.rule).prepare(step)
        given = self.attended(found), self.attended(expected)
        torch.testing.assert_close(*given, atol=1e-5, rtol=1e-4)


KINDS = st.sampled_from([TrtllmAttention, FlashAttention])
WINDOWS = st.one_of(st.none(), st.sampled_from([1, 2, 9, 64, 200, 1000]))
STARTS = st.one_of(st.just(0), st.integers(0, LONGEST))
SIZES = st.sampled_from([16, 32, 64])


def rule_for(kind: type[AttentionBackend], window: int | None, sinks: bool) -> AttentionRule:
    """The rule with these parts, and with a soft cap if the backend has caps."""
    return AttentionRule(window, 1.5 if kind is FlashAttention else None, sinks)


@settings(max_examples=examples(50))
@given(
    kind=KINDS,
    window=WINDOWS,
    sinks=st.booleans(),
    reqs=st.lists(st.tuples(STARTS, st.integers(1, 300)), min_size=1, max_size=ROWS),
    size=SIZES,
)
def test_prompts_equal_the_torch_backend(
    kind: type[AttentionBackend],
    window: int | None,
    sinks: bool,
    reqs: list[tuple[int, int]],
    size: int,
    arch: int,
) -> None:
    Other.steps = 0
    Scene(rule_for(kind, window, sinks), reqs, size).check(kind, 0)
    assert Other.steps == (kind is TrtllmAttention and arch == 90)


@settings(max_examples=examples(50))
@given(
    kind=KINDS,
    window=WINDOWS,
    sinks=st.booleans(),
    starts=st.lists(STARTS, min_size=1, max_size=ROWS),
    width=st.sampled_from([1, 1, 3]),
    size=SIZES,
)
def test_decode_equals_the_torch_backend(
    kind: type[AttentionBackend],
    window: int | None,
    sinks: bool,
    starts: list[int],
    width: int,
    size: int,
    arch: int,
) -> None:
    """The graph gets the requests after it is made. trtllm leaves drafts to minisgl's kernel."""
    Other.steps = 0
    reqs = [(start, width) for start in starts]
    scene = Scene(rule_for(kind, window, sinks), reqs, size)
    scene.check(kind, len(reqs))
    assert Other.steps == (kind is TrtllmAttention and width > 1)
    if kind is TrtllmAttention and width > 1:
        return
    step = scene.step(len(reqs))
    padding = step._replace(
        start=np.zeros_like(step.start),
        device_rows=torch.full_like(step.device_rows, ROWS),
        device_start=torch.zeros_like(step.device_start),
    )
    captured = kind(scene.pool, Q_HEADS, scene.rule).decode_graph(len(reqs), padding)
    assert captured is not None
    assert not isinstance(captured, FusedAttention)
    padding.device_rows.copy_(step.device_rows)
    padding.device_start.copy_(step.device_start)
    captured.compute_metadata()
    scene.check(kind, len(reqs), captured)


def test_more_prompts_than_a_compiled_kernel_takes_are_divided(arch: int) -> None:
    scene = Scene(PLAIN, [(5, 3)], 16)
    one = scene.step(0)
    several = AttentionStep(
        *(0, one.start.repeat(300), one.lengths.repeat(300), one.device_rows.repeat(300)),
        *(one.device_start.repeat(300), one.device_lengths.repeat(300), one.page_table),
    )
    attention = FlashAttention(scene.pool, Q_HEADS).prepare(several)
    assert isinstance(attention, InTurn)
    expected = scene.attended(TorchAttention(scene.pool, Q_HEADS).prepare(one))
    q, out = scene.q.repeat(300, 1, 1), torch.full((900, Q_HEADS, DIM), torch.nan)
    attention.forward(3, q, out)
    torch.testing.assert_close(out, expected.repeat(300, 1, 1), atol=1e-5, rtol=1e-4)


def test_each_phase_has_the_backend_of_its_name(arch: int) -> None:
    both = resolve_phases("trtllm,flash-attention", GPU)
    assert both == (TrtllmAttention, FlashAttention)
    assert resolve_phases("torch,trtllm", GPU) == (TorchAttention, TrtllmAttention)
    # A backend that is no subclass of another one never takes its decode steps.
    assert not issubclass(TrtllmAttention, FlashInferAttention)


def test_trtllm_compiles_the_modules_that_run_its_prompts(arch: int) -> None:
    found = {
        each: [str(kernel) for kernel in attention_kernels("trtllm", [GPU], [each])]
        for each in (90, 100)
    }
    assert found == {90: ["fa2 bfloat16 128"], 100: []}
    assert attention_kernels("flash-attention", [GPU], [90]) == []


@pytest.mark.parametrize(
    ("name", "needs", "says"),
    [
        ("trtllm", {"page_size": 1}, r"page_size \(16, 32, 64\), not 1"),
        ("trtllm", {"head_dim": 80}, "supports head_dim"),
        ("trtllm", {"fp8_kv": True}, "does not support an FP8 KV cache"),
        ("trtllm", {"dtype": torch.float32}, "bfloat16 and float16, not float32"),
        ("trtllm", {"rules": frozenset({AttentionRule(soft_cap=5.0)})}, "soft caps"),
        ("flash-attention", {"page_size": 128}, "supports page_size"),
        ("flash-attention", {"head_dim": 512}, "supports head_dim"),
        ("flash-attention", {"fp8_kv": True}, "does not support an FP8 KV cache"),
        (
            "flash-attention",
            {"head_dim": 256, "page_size": 64, "rules": frozenset({AttentionRule(window=8)})},
            "page_size 1 to 32 for windows with head_dim 256, not 64",
        ),
    ],
)
def test_models_that_a_backend_cannot_run_are_refused(
    name: str, needs: dict[str, Any], says: str, arch: int
) -> None:
    resolve_phases(name, GPU)
    with pytest.raises(ConfigError, match=says):
        resolve_phases(name, GPU._replace(**needs))


def test_the_remedy_of_an_old_flashinfer_excludes_it(
    arch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip keeps an installed version that the remedy allows."""
    monkeypatch.setattr("minisgl.build.versions.version", lambda package: "0.6.18")
    with pytest.raises(ConfigError, match=r"0\.7 or later, not 0\.6\.18") as refused:
        resolve_phases("trtllm", GPU)
    remedy = re.search(r"pip install '(.+?)'", str(refused.value))
    assert remedy is not None
    requirement = Requirement(remedy[1])
    assert requirement.name == "flashinfer-python"
    versions = ["0.6.13", "0.6.18", "0.7.0", "0.7.2", "0.8.0"]
    assert list(requirement.specifier.filter(versions)) == ["0.7.0", "0.7.2"]


def test_a_cpu_and_other_gpus_are_refused(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Scene(PLAIN, [(5, 3)], 16).pool
    for name in ("trtllm", "flash-attention"):
        with pytest.raises(ConfigError, match="needs a CUDA device, not cpu"):
            create_attention_backend(name, pool, Q_HEADS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    for name in ("trtllm", "flash-attention"):
        with pytest.raises(ConfigError, match=r"compute capability 9\.x, 10\.x.*, not 8\.0"):
            resolve_phases(name, GPU)


def test_auto_takes_neither(arch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    assert resolve_phases("auto", GPU) == (TritonAttention, TritonAttention)
