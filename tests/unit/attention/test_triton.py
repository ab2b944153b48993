"""The backend whose decode steps run minisgl's kernel, and whose prompts run on torch."""

import logging
from typing import Any

import numpy as np
import pytest
import torch

from bench.noise import fill_noise
from minisgl.attention.base import (
    AttentionBackend,
    AttentionNeeds,
    AttentionRule,
    AttentionStep,
    FusedAttention,
)
from minisgl.attention.decode import BalancedDecode
from minisgl.attention.flashinfer import FlashInferAttention
from minisgl.attention.registry import (
    attention_kernels,
    create_attention_backend,
    resolve_phases,
)
from minisgl.attention.torch import TorchAttention
from minisgl.attention.triton import TritonAttention
from minisgl.kernel.decode import DecodeScratch, decode_scratch
from minisgl.kvcache.pool import KVPool, KVSpec

Q_HEADS, KV_HEADS, DIM, PAGE = 8, 1, 512, 4
GPU = AttentionNeeds(torch.device("cuda"), torch.bfloat16, DIM, page_size=16)
START = [17, 0, 30]


@pytest.fixture(autouse=True)
def flashinfer_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)


def step_of(num_decode: int, lengths: list[int]) -> AttentionStep:
    start, counts = np.array([START, lengths], dtype=np.int32)
    table = torch.randperm(40, dtype=torch.int32).view(4, 10)
    tensors = [torch.tensor(each, dtype=torch.int32) for each in ([2, 0, 1], START, lengths)]
    return AttentionStep(num_decode, start, counts, *tensors, table)


def make_pool(device: str = "cpu", dim: int = DIM) -> KVPool:
    spec, where = KVSpec(KV_HEADS, dim, torch.float32), torch.device(device)
    pool = KVPool(spec, layers=(0,), num_pages=40, page_size=PAGE, device=where)
    if device == "cpu":
        fill_noise(pool, 40)
    return pool


@pytest.mark.parametrize(
    ("changes", "backend"),
    [
        ({}, TritonAttention),
        ({"fp8_kv": True}, TritonAttention),
        ({"rules": frozenset({AttentionRule(8, 2.0, sinks=True)})}, TritonAttention),
        ({"head_dim": 256}, FlashInferAttention),
        ({"head_dim": 80}, TorchAttention),
        ({"dtype": torch.float32}, TorchAttention),
        ({"device": torch.device("cpu")}, TorchAttention),
    ],
    ids=str,
)
def test_auto_takes_it_where_flashinfer_cannot_run(
    changes: dict[str, Any], backend: type[AttentionBackend]
) -> None:
    assert resolve_phases("auto", GPU._replace(**changes)) == (backend, backend)


def test_a_start_compiles_no_flashinfer_module_for_it() -> None:
    assert attention_kernels("auto", [GPU], [80, 90]) == []


@pytest.mark.parametrize(
    ("needs", "says"),
    [
        (GPU, "attention of prompts runs on torch and is slow; flashinfer cannot run"),
        (GPU._replace(head_dim=80), "attention runs on torch and is slow; flashinfer cannot run"),
        (GPU._replace(head_dim=128), None),
    ],
    ids=["triton", "torch", "flashinfer"],
)
def test_a_warning_names_the_part_that_runs_on_torch(
    needs: AttentionNeeds,
    says: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The pool is on the meta device: the backends see a GPU."""
    monkeypatch.setattr("minisgl.attention.registry.AttentionNeeds", lambda *args: needs)
    monkeypatch.setattr(FlashInferAttention, "__init__", lambda *args: None)
    with caplog.at_level(logging.WARNING):
        create_attention_backend("auto", make_pool("meta"), Q_HEADS)
    assert [record.getMessage()[: len(says or "")] for record in caplog.records] == (
        [] if says is None else [says]
    )


def test_prompts_run_on_torch() -> None:
    pool, step = make_pool(), step_of(0, [3, 5, 1])
    q, found = torch.randn(9, Q_HEADS, DIM), []
    for kind in (TritonAttention, TorchAttention):
        found.append(torch.full_like(q, torch.nan))
        kind(pool, Q_HEADS).prepare(step).forward(0, q, found[-1])
    assert torch.equal(*found)


def test_steps_share_the_scratch_of_the_most_new_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def noted(*args: Any) -> DecodeScratch:
        made.append(args[-1])
        return decode_scratch(*args)

    monkeypatch.setattr("minisgl.attention.decode.decode_scratch", noted)
    backend = TritonAttention(make_pool(), Q_HEADS)
    for width in (2, 1, 2, 4, 3, 1):
        backend.decode_graph(3, step_of(3, [width] * 3))
    assert made == [2, 4]


@pytest.mark.parametrize("width", [1, 3])
def test_decode_steps_run_the_fused_kernel_with_and_without_a_graph(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the reference of the kernel runs, which needs no blocks."""
    monkeypatch.setattr(BalancedDecode, "compute_metadata", lambda decode: None)
    pool, step = make_pool(), step_of(3, [width] * 3)
    q, backend = torch.randn(3 * width, Q_HEADS, DIM), TritonAttention(pool, Q_HEADS)
    expected = torch.full_like(q, torch.nan)
    TorchAttention(pool, Q_HEADS).prepare(step).forward(0, q, expected)
    for attention in (backend.prepare(step), backend.decode_graph(3, step)):
        assert isinstance(attention, FusedAttention)
        out = torch.full_like(q, torch.nan)
        attention.forward(0, q, out)  # type: ignore[attr-defined]
        torch.testing.assert_close(out, expected)
