"""The parts of a dry run that need no Triton. tests/gpu and the image run complete dry runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.attention.base import AttentionNeeds, AttentionRule, AttentionStep
from minisgl.attention.registry import (
    PhasedAttention,
    attention_kernels,
    create_attention_backend,
)
from minisgl.benchmark.models import write_model
from minisgl.compile.dry_run import (
    DryRunEngine,
    HostCopies,
    MetaAttention,
    MetaCommunicator,
    attention_needs,
    on_meta,
)
from minisgl.core import ConfigError, EngineConfig
from minisgl.demo import model_path
from minisgl.distributed.comm import TPInfo
from minisgl.kvcache.pool import KVPool, KVSpec

META = torch.device("meta")


def test_a_copy_of_a_meta_tensor_to_the_host_is_zeros() -> None:
    tokens = torch.empty((2, 3), dtype=torch.int32, device=META)
    with HostCopies():
        copy = tokens.to("cpu", non_blocking=True)
        assert torch.ones(2).to("cpu").tolist() == [1.0, 1.0]
        assert tokens.to(torch.int64).is_meta
    assert copy.device.type == "cpu"
    assert copy.dtype == torch.int32
    assert copy.tolist() == [[0, 0, 0], [0, 0, 0]]
    with pytest.raises(NotImplementedError):
        tokens.to("cpu")


@pytest.mark.parametrize(("size", "peers"), [(1, False), (2, True), (3, False), (4, True)])
def test_a_dry_run_rank_has_peer_memory_if_a_gpu_rank_may_have_it(size: int, peers: bool) -> None:
    comm = MetaCommunicator(TPInfo(0, size))
    assert (comm.peers is not None) == peers
    gathered = comm.gather(torch.empty((5, 7), device=META))
    assert (gathered.shape, gathered.is_meta) == ((size, 5, 7), True)
    assert comm.agree_min(3) == 3


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("flashinfer", ("MetaAttention", "MetaAttention")),
        ("torch,flashinfer", ("TorchAttention", "MetaAttention")),
        ("torch", ("TorchAttention", "TorchAttention")),
        ("trtllm,flash-attention", ("MetaAttention", "MetaAttention")),
    ],
)
def test_a_dry_run_replaces_the_backends_of_gpus_alone(
    name: str, kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    monkeypatch.setattr("minisgl.build.versions.version", lambda package: "4.1")
    spec = KVSpec(kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    pool = KVPool(spec, layers=(0,), num_pages=1, page_size=16, device=META)
    needs = AttentionNeeds(torch.device("cuda"), spec.dtype, spec.head_dim, pool.page_size)
    resolved = on_meta(name, [needs])
    backend = create_attention_backend(resolved, pool, 4, added=(MetaAttention,))
    assert isinstance(backend, PhasedAttention)
    assert (type(backend.prefill).__name__, type(backend.decode).__name__) == kinds
    assert MetaAttention(pool, 4).decode_graph(1, step=None) is None


def test_the_engine_of_a_dry_run_holds_no_data() -> None:
    config = EngineConfig(
        model_path=str(model_path()),
        num_pages=1,
        dummy_weight=True,
        attention_backend="torch",
        moe_backend="torch",
    )
    engine = DryRunEngine(config, MetaCommunicator(TPInfo(0, 1)))
    assert engine.facts().device == "meta"
    parameters = list(engine._launcher.runner.model.parameters())
    assert parameters
    assert all(parameter.is_meta for parameter in parameters)


def test_flashinfer_kernels_with_windows_are_compiled_only_for_models_that_run_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: module)
    full, windows = (
        attention_needs(EngineConfig(model_path=write_model(name, tmp_path / name)))
        for name in ("qwen3-8b", "gpt-oss-20b")
    )
    names = [f"{variant} bfloat16" for variant in ("fa2", "fa3")]
    assert [str(each) for each in attention_kernels("auto", full, [90])] == [
        f"{name} 128" for name in names
    ]
    assert [str(each) for each in attention_kernels("auto", windows, [90])] == [
        f"{name} 64{mask}" for name in names for mask in ("", " window")
    ]
    assert attention_kernels("torch", windows, [90]) == []
    with pytest.raises(ConfigError, match="supports head_dim"):
        attention_kernels("flashinfer", [full[0]._replace(head_dim=80)], [90])


def test_the_torch_backend_runs_windows_on_meta_tensors() -> None:
    spec = KVSpec(kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    full, windows = (
        KVPool(spec, layers=(layer,), num_pages=1, page_size=16, device=META) for layer in (0, 1)
    )
    rules = [AttentionRule(sinks=True), AttentionRule(window=4, sinks=True)]
    backend = create_attention_backend("torch", full, 4, rules, windows=windows)
    start, lengths = np.array([[9, 3], [1, 5]], dtype=np.int32)
    column = torch.empty(2, dtype=torch.int32, device=META)
    table = torch.empty((2, 4), dtype=torch.int32, device=META)
    attention = backend.prepare(
        AttentionStep(1, start, lengths, column, column, column, table, table)
    )
    q = torch.empty((6, 4, 64), dtype=torch.bfloat16, device=META)
    for layer in range(2):
        attention.forward(layer, q, torch.empty_like(q), q[0, :, 0])
