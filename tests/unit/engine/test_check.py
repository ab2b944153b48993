"""The check of a configuration before an engine starts."""

import json
from pathlib import Path

import pytest
import torch

from minisgl.benchmark.models import write_model
from minisgl.core import ConfigError, EngineConfig
from minisgl.demo import model_path
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.engine import DEFAULT_EXTENSIONS, Engine, check_start, memory
from minisgl.engine.check import check_before_weights

CHECKPOINTS = Path(__file__).parents[2] / "data" / "checkpoints"


def check(folder: str = str(model_path()), tp: int = 1, **changes: object) -> None:
    config = EngineConfig(model_path=folder, tp_size=tp, **{"device": "cpu", **changes})
    check_start(config, TPInfo(0, tp), DEFAULT_EXTENSIONS)


def test_demo_model_has_no_fault() -> None:
    check()
    check(tp=2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"device": "tpu"}, "device 'tpu' is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
        ({"max_seq_len": 10**9}, "max_seq_len 1000000000 is outside"),
        ({"attention_backend": "flashinfer"}, "'flashinfer' cannot be used: it needs a CUDA"),
        ({"moe_backend": "triton"}, "MoE backend 'triton' cannot be used: it needs a GPU"),
        ({"moe_backend": "magic"}, "MoE backend 'magic' is not known"),
    ],
)
def test_fault_of_a_setting_is_named(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        check(**changes)


def test_folder_without_weights_is_a_fault_unless_the_weights_are_random(tmp_path: Path) -> None:
    folder = write_model("qwen3-30b-a3b", tmp_path)
    check(folder, dummy_weight=True)
    with pytest.raises(ConfigError, match=r"has no \*\.safetensors file"):
        check(folder)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["SurpriseForCausalLM"]}, "architecture SurpriseForCausalLM is not"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\) is not"),
        ({"vocab_size": 2**30}, "each of 1 ranks needs "),
    ],
)
def test_config_alone_shows_that_a_model_cannot_be_served(
    changes: dict[str, object], expected: str, tmp_path: Path
) -> None:
    published = json.loads((model_path() / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published | changes))
    config = EngineConfig(model_path=str(tmp_path), device="cpu")
    with pytest.raises(ConfigError, match=expected):
        check_before_weights(config, DEFAULT_EXTENSIONS)


def test_check_for_a_gpu_touches_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An allocation would reduce the memory that the engine finds. torch has no CUDA here."""
    monkeypatch.setattr(memory, "resolve_device", lambda config, tp: torch.device("cuda", 0))
    check(write_model("qwen3-30b-a3b", tmp_path), device="cuda", dummy_weight=True)


@pytest.mark.parametrize(
    "name", ["qwen3-next-80b-a3b-instruct-fp8", "qwen3.6-27b", "qwen3.6-35b-a3b"]
)
def test_a_page_size_without_kernels_for_states_is_refused(name: str, tmp_path: Path) -> None:
    """The check before a download, the check before a start, and the engine itself."""
    published = json.loads((CHECKPOINTS / f"{name}.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(published["config"]))
    config = EngineConfig(model_path=str(tmp_path), device="cpu", dummy_weight=True, page_size=8)
    says = r"page_size 8 is not supported .* gated delta nets; supported: 16, 32, 64$"
    with pytest.raises(ConfigError, match=says):
        check_before_weights(config, DEFAULT_EXTENSIONS)
    with pytest.raises(ConfigError, match=says):
        check(str(tmp_path), dummy_weight=True, page_size=8)
    with pytest.raises(ConfigError, match=says):
        Engine(config, SingleCommunicator())
