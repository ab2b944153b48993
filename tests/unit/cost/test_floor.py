"""The cost of a model against values computed by hand."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from minisgl.benchmark.floor import load_shape
from minisgl.core import ConfigError
from minisgl.cost.floor import cost_of, reduce_s, with_weights
from minisgl.layers.linear import UnquantizedLinear
from minisgl.models.build import ModelExtensions, stored_weights
from minisgl.models.quantization import UNQUANTIZED, Quantization, StoredWeights
from minisgl.quantization import with_quantizations


def test_a_dense_model_reads_its_weights_once_per_step(tmp_path: Path) -> None:
    _, model = load_shape("qwen3-8b", tmp_path)
    cost = cost_of(model)
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288
    assert cost.weight_bytes == cost.operations == 2 * (36 * layer + 4096 * 151936)
    assert cost.read_bytes(1) == cost.read_bytes(256) == cost.weight_bytes
    assert cost.kv_bytes == 2 * 36 * 8 * 128 * 2
    assert cost_of(model, fp8_kv=True).kv_bytes == 2 * 36 * 8 * (128 + 2)


def test_an_expert_is_read_when_a_token_is_routed_to_it(tmp_path: Path) -> None:
    _, model = load_shape("qwen3-30b-a3b", tmp_path)
    cost = cost_of(model)
    attention = 2048 * 128 * (32 + 4 + 4 + 32)
    expert = 3 * 2048 * 768
    shared = 48 * (attention + 2048 * 128) + 2048 * 151936
    assert cost.weight_bytes == 2 * shared
    assert cost.read_bytes(1) == pytest.approx(2 * (shared + 48 * 8 * expert))
    assert cost.operations == cost.read_bytes(1)  # 2 operations for each weight of 2 bytes
    # A token is routed to 8 of 128 experts: with 16 tokens, an expert is unused with probability
    # (15 / 16) ** 16 = 0.356074.
    assert cost.read_bytes(16) == pytest.approx(2 * (shared + 48 * 128 * expert * (1 - 0.356074)))
    assert cost.read_bytes(8192) == pytest.approx(2 * (shared + 48 * 128 * expert))
    assert cost.kv_bytes == 2 * 48 * 2 * 4 * 128


def test_an_all_reduce_takes_its_measured_time_or_an_interpolated_one() -> None:
    row = 2 * 5120
    assert reduce_s(1, row) == 0
    assert reduce_s(4, 256 * row) == pytest.approx(19.9e-6)
    assert reduce_s(4, 160 * row) == pytest.approx((10.5 + 19.9) / 2 * 1e-6)
    assert reduce_s(2, 2 * 8192 * row) == pytest.approx(2 * 309e-6)
    with pytest.raises(ConfigError, match="all-reduce over 8 GPUs was not measured"):
        reduce_s(8, row)


def test_each_sum_over_the_ranks_is_counted(tmp_path: Path) -> None:
    _, dense = load_shape("qwen3-8b", tmp_path / "dense")
    assert cost_of(dense, 2).reduces == 1 + 2 * 36
    _, with_inputs = load_shape("gemma-4-e2b", tmp_path / "inputs")
    assert cost_of(with_inputs, 2).reduces == 1 + 3 * 35, "attention, MLP and input of each layer"


def test_fp8_weights_halve_the_linears_and_the_experts(tmp_path: Path) -> None:
    """The output head and the routers stay bf16."""
    _, dense = load_shape("qwen3-8b", tmp_path / "dense")
    cost = with_weights(cost_of(dense), dense, StoredWeights("fp8", 8))
    layer = 4096 * 128 * (32 + 8 + 8 + 32) + 3 * 4096 * 12288
    assert cost.weight_bytes == 36 * layer + 2 * 4096 * 151936
    assert cost.fp8_operations == 2 * 36 * layer
    _, sparse = load_shape("qwen3-30b-a3b", tmp_path / "sparse")
    plain = cost_of(sparse)
    cost = with_weights(plain, sparse, StoredWeights("fp8", 8))
    kept = 2 * (2048 * 151936 + 48 * 2048 * 128)
    assert cost.weight_bytes == kept + (plain.weight_bytes - kept) // 2
    assert cost.expert_bytes == plain.expert_bytes // 2
    assert cost.fp8_operations == plain.operations - kept


FP8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
MIXED = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "targets": ["re:.*self_attn.*"],
            "weights": FP8,
            "input_activations": FP8,
        },
        "group_1": {"format": "pack-quantized", "targets": ["Linear"], "weights": INT4},
    },
}


@pytest.mark.parametrize(
    ("settings", "name", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "int4", 4.25),
        ({"quant_method": "gptq", "bits": 4, "group_size": 64}, "int4", 5),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4", 4.25),
        (MIXED, "int4", 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", 5),
    ],
)
def test_four_bits_leave_the_head_and_the_routers(
    settings: dict[str, Any], name: str, bits: float, tmp_path: Path
) -> None:
    _, sparse = load_shape("qwen3-30b-a3b", tmp_path)
    plain = cost_of(sparse)
    packed = msgspec.structs.replace(sparse, quantization=settings)
    stored = stored_weights(packed, None, with_quantizations())
    cost = with_weights(plain, packed, stored)
    assert stored.name == name
    kept = 2 * (2048 * 151936 + 48 * 2048 * 128)
    assert cost.weight_bytes == kept + (plain.weight_bytes - kept) * bits / 16
    assert cost.expert_bytes == plain.expert_bytes * bits / 16
    assert cost.fp8_operations == 0


def test_a_format_of_another_package_counts_as_it_says(tmp_path: Path) -> None:
    """Regression: the floor read quantization_config itself, and counted each other name as FP8."""
    _, dense = load_shape("qwen3-8b", tmp_path)
    theirs = msgspec.structs.replace(dense, quantization={"quant_method": "theirs"})
    two_bits = Quantization(UnquantizedLinear, stored=StoredWeights("two bits", 2))
    for method, stored in ((two_bits, two_bits.stored), (UNQUANTIZED, StoredWeights())):
        known = ModelExtensions(quantizations={"theirs": lambda _, method=method: method})
        assert stored_weights(theirs, None, known) == stored
    plain, cost = cost_of(dense), with_weights(cost_of(dense), dense, two_bits.stored)
    kept = 2 * 4096 * 151936
    assert cost.weight_bytes == kept + (plain.weight_bytes - kept) // 8
    assert cost.fp8_operations == 0


@pytest.mark.parametrize(
    ("shape", "layers", "experts"), [("gpt-oss-20b", 24, 32), ("gpt-oss-120b", 36, 128)]
)
def test_mxfp4_experts_have_17_bytes_for_32_weights(
    shape: str, layers: int, experts: int, tmp_path: Path
) -> None:
    _, model = load_shape(shape, tmp_path)
    stored = stored_weights(model, None, with_quantizations())
    cost = with_weights(cost_of(model), model, stored)
    assert stored.name == "mxfp4"
    assert cost.expert_bytes == layers * experts * 3 * 2880 * 2880 // 32 * 17
    assert cost._replace(expert_bytes=0) == cost_of(model)._replace(expert_bytes=0)
    assert model.max_position == 131072
