"""An attention backend and a MoE backend from outside the package run in a real forward."""

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minisgl.attention.base import (
    PLAIN,
    AttentionBackend,
    AttentionRule,
    AttentionStep,
    Capabilities,
    StepAttention,
)
from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine import Engine, Extensions
from minisgl.kvcache.pool import KVPool
from minisgl.moe.base import ExpertWeights, MoeBackend, Router
from minisgl.moe.torch_backend import TorchMoe
from tests.parity.driver import Driver
from tests.parity.models import build_model, transformers_greedy

PROMPT = list(range(3, 30))


class PlainAttention(AttentionBackend):
    """Plain attention, computed for one token after the other."""

    name = "plain-attention"
    capabilities = Capabilities(dtypes=(torch.float32,), head_dims=(16, 32))
    prepared = 0

    def __init__(self, pool: KVPool, q_heads: int, rule: AttentionRule = PLAIN) -> None:
        self.pool = pool

    def prepare(self, step: AttentionStep) -> StepAttention:
        type(self).prepared += 1
        return WrittenOutStep(self.pool, step)


class WrittenOutStep:
    def __init__(self, pool: KVPool, step: AttentionStep) -> None:
        self.pool, self.step = pool, step

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        step, size, token = self.step, self.pool.page_size, 0
        for row, start, length in zip(step.device_rows, step.start, step.lengths, strict=True):
            for position in range(int(start), int(start + length)):
                slots = torch.arange(position + 1)
                slots = step.page_table[row].long()[slots // size] * size + slots % size
                keys, values = (part.flatten(0, 1)[slots] for part in self.pool.layer(layer))
                group = q.shape[1] // keys.shape[1]
                keys, values = (part.repeat_interleave(group, 1) for part in (keys, values))
                weights = torch.einsum("hd,chd->hc", q[token], keys) / q.shape[2] ** 0.5
                out[token] = torch.einsum("hc,chd->hd", weights.softmax(-1), values)
                token += 1


class CountingMoe(TorchMoe):
    """The torch backend, which also counts its calls."""

    name = "counting"
    calls = 0

    def forward(self, x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
        type(self).calls += 1
        return super().forward(x, router, weights)


class FailingMoe(TorchMoe):
    """A backend that must not be made."""

    name = "failing"

    def __init__(self, device: torch.device) -> None:
        pytest.fail("a model without experts needs no backend for them")


ADDED = Extensions(attention_backends=(PlainAttention,), moe_backends=(CountingMoe, FailingMoe))


def engine(path: str, **settings: object) -> Engine:
    config = EngineConfig(
        model_path=path, device="cpu", num_pages=64, page_size=4, max_running_reqs=4, **settings
    )
    return Engine(config, SingleCommunicator(), extensions=ADDED)


@pytest.mark.parametrize(
    "name", ["plain-attention", "torch,plain-attention", "plain-attention,torch"]
)
def test_an_attention_backend_from_outside_runs_either_phase(name: str, tmp_path: Path) -> None:
    path = build_model("qwen3", tmp_path)
    PlainAttention.prepared = 0
    driver = Driver(engine(path, attention_backend=name))
    assert driver.generate(0, PROMPT, 4, chunk=10) == transformers_greedy(path, PROMPT, 4)
    phases = {"plain-attention": 6, "torch,plain-attention": 3, "plain-attention,torch": 3}
    assert PlainAttention.prepared == phases[name]


def test_its_capabilities_are_compared_with_the_model(tmp_path: Path) -> None:
    path = build_model("qwen3", tmp_path)
    with pytest.raises(
        ConfigError, match="'plain-attention' cannot be used: it supports float32, not"
    ):
        engine(path, attention_backend="plain-attention", dtype="bfloat16")
    with pytest.raises(ConfigError, match="cannot be used: it does not support an FP8 KV cache"):
        engine(path, attention_backend="plain-attention", kv_cache_dtype="fp8")
    wide = build_model("qwen3-wide", tmp_path)
    with pytest.raises(ConfigError, match=r"it supports head_dim \(16, 32\), not 128"):
        engine(wide, attention_backend="plain-attention")
    with pytest.raises(
        ConfigError, match=r"'other' is not known; known: auto, .*, plain-attention$"
    ):
        engine(path, attention_backend="other")


def test_auto_prefers_the_backends_of_the_package(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = build_model("qwen3", tmp_path)
    PlainAttention.prepared = 0
    with caplog.at_level(logging.WARNING):
        Driver(engine(path)).generate(0, PROMPT, 2)
    assert PlainAttention.prepared == 0
    assert not caplog.records, "a CPU falls back to torch without a warning"


def test_a_registration_ends_with_its_engine(tmp_path: Path) -> None:
    config = EngineConfig(
        model_path=build_model("qwen3", tmp_path), device="cpu", attention_backend="plain-attention"
    )
    with pytest.raises(ConfigError, match="'plain-attention' is not known"):
        Engine(config, SingleCommunicator())


def test_a_moe_backend_from_outside_runs(tmp_path: Path) -> None:
    path = build_model("qwen3-moe", tmp_path)
    CountingMoe.calls = 0
    driver = Driver(engine(path, moe_backend="counting"))
    assert issubclass(CountingMoe, MoeBackend)
    assert driver.generate(0, PROMPT, 3) == transformers_greedy(path, PROMPT, 3)
    assert CountingMoe.calls == 2 * 3, "two layers in three steps"


def test_a_model_without_experts_makes_no_moe_backend(tmp_path: Path) -> None:
    engine(build_model("qwen3", tmp_path), moe_backend="failing")
