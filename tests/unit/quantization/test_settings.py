"""The settings of quantised checkpoints: which linears are FP8, and the refusal of the rest."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.core import ConfigError
from minisgl.layers.shards import LinearShards, Shard
from minisgl.models.config import load_model_spec
from minisgl.models.quantization import Quantization
from minisgl.quantization import with_quantizations
from minisgl.quantization.awq import awq
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.gptq import gptq
from minisgl.quantization.linear import Fp8Linear
from minisgl.quantization.settings import (
    compressed_tensors,
    fbgemm,
    fine_grained,
    modelopt,
)
from tests.parity.driver import make_engine
from tests.parity.fp8_models import FORMATS, build_fp8

Settings = Mapping[str, Any]
_COMPRESSED = FORMATS["compressed-channel"][0]
_GROUP = _COMPRESSED["config_groups"]["group_0"]


def group(**changes: Any) -> Settings:
    return {**_COMPRESSED, "config_groups": {"group_0": {**_GROUP, **changes}}}


def int4(**changes: Any) -> Settings:
    scheme = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, **changes}
    return group(format="pack-quantized", weights=scheme, input_activations=None)


def weights(**changes: Any) -> Settings:
    return group(weights={**_GROUP["weights"], **changes})


@pytest.mark.parametrize(
    ("read", "settings", "message"),
    [
        (fine_grained, {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (fine_grained, {"weight_block_size": [64, 64]}, r"weight_block_size \[64, 64\]"),
        (fine_grained, {"activation_scheme": "none"}, "activation_scheme is 'none'"),
        (fine_grained, {"modules_to_convert": ["embed"]}, "modules_to_convert"),
        (fine_grained, {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        (fine_grained, {"ignored_layers": "lm_head"}, "ignored_layers is 'lm_head'"),
        (fbgemm, {"modules_to_not_convert": 3}, "modules_to_not_convert is 3"),
        (modelopt, {"quant_algo": "W4A8"}, "quant_algo .W4A8."),
        (modelopt, {}, "quant_algo"),
        (compressed_tensors, group(format="int-quantized"), "format .int-quantized."),
        (compressed_tensors, {"transform_config": {"a": 1}}, "transform_config"),
        (compressed_tensors, {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
        (
            compressed_tensors,
            weights(num_bits=4),
            r"^quantization_config\.config_groups\.group_0\.weights: num_bits 4",
        ),
        (compressed_tensors, weights(type="int"), "type int"),
        (compressed_tensors, weights(symmetric=False), "symmetric False"),
        (compressed_tensors, weights(strategy="group"), "strategy 'group'"),
        (compressed_tensors, weights(strategy="block", block_structure=[1, 64]), r"\[1, 64\]"),
        (compressed_tensors, group(input_activations=None), "input_activations null"),
        (compressed_tensors, group(input_activations={"num_bits": 8, "type": "int"}), "type int"),
        (compressed_tensors, int4(type="float"), "num_bits 4, type float, symmetric True"),
        (compressed_tensors, int4(strategy="tensor"), "strategy 'tensor'"),
        (compressed_tensors, int4(group_size=12), "group_size 12 is not supported"),
        (compressed_tensors, int4(actorder="columns"), "actorder 'columns'"),
        (awq, {"bits": 3}, "bits 3"),
        (awq, {"version": "gemv"}, "version 'gemv'"),
        (awq, {"zero_point": False}, "zero_point False"),
        (awq, {"group_size": 0}, "group_size 0 is not supported"),
        (gptq, {"bits": 8}, "bits 8"),
        (gptq, {"lm_head": True}, "lm_head True"),
        (gptq, {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (gptq, {"dynamic": {".*mlp": {"bits": 8}}}, r"dynamic has settings for '\.\*mlp'"),
        (modelopt, {"quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        (compressed_tensors, group(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_a_setting_that_is_not_supported_is_refused_by_name(
    read: Callable[[Settings], Quantization], settings: Settings, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(settings)


def form_of(quantization: Quantization, parent: str, *names: str) -> Fp8Format | None:
    outputs = tuple(Shard(name, 128, 0, 128) for name in names)
    shards = LinearShards(outputs, Shard("", 128, 0, 128), bias=False, parent=parent)
    method = quantization.linear(shards, torch.float32)
    return method.form if isinstance(method, Fp8Linear) else None


BLOCK, TENSOR, CHANNEL = (
    Fp8Format("block", "weight_scale_inv"),
    Fp8Format("tensor"),
    Fp8Format("channel"),
)


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        (
            fine_grained(
                {
                    "weight_block_size": [128, 128],
                    "modules_to_not_convert": ["model.layers.1"],
                    "ignored_layers": ["mlp.down"],
                }
            ),
            [BLOCK, None, None, BLOCK],
        ),
        (fine_grained({"ignored_layers": ["mlp"]}), [TENSOR, None, TENSOR, None]),
        (fbgemm({"modules_to_not_convert": ["mlp.down"]}), [CHANNEL, None, CHANNEL, CHANNEL]),
        (
            modelopt({"quant_algo": "FP8", "exclude_modules": ["*layers.1*", "mlp.down"]}),
            [TENSOR, None, None, TENSOR],
        ),
        (
            compressed_tensors({**_COMPRESSED, "ignore": [r"re:.*\.down$", "model.layers.1.a.q"]}),
            [CHANNEL, None, None, CHANNEL],
        ),
        (
            compressed_tensors({**_COMPRESSED, "ignore": ["mlp.down", "layers.1"]}),
            [CHANNEL, None, None, CHANNEL],
        ),
        (compressed_tensors(group(targets=[r"re:.*\.a\.q"])), [CHANNEL, None, CHANNEL, None]),
        (compressed_tensors({"config_groups": {}}), [None, None, None, None]),
    ],
)
def test_lists_of_ignored_modules(
    quantization: Quantization, expected: list[Fp8Format | None]
) -> None:
    """An entry matches whole parts of a name: mlp.down is not mlp.down_proj."""
    linears = [
        ("model.layers.0.a", "q"),
        ("model.layers.0.mlp", "down"),
        ("model.layers.1.a", "q"),
        ("model.layers.0.mlp", "down_proj"),
    ]
    assert [form_of(quantization, parent, name) for parent, name in linears] == expected


def test_null_as_block_size_selects_the_names_that_transformers_writes() -> None:
    """Ministral-3-*-Instruct: one scale for each tensor, named weight_scale_inv."""
    quantization = fine_grained(
        {
            "activation_scheme": "static",
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
            "weight_block_size": None,
        }
    )
    form = form_of(quantization, "model.layers.0.self_attn", "q_proj", "k_proj")
    assert form == Fp8Format("tensor", "weight_scale_inv")
    assert "model.layers.0.mlp.down_proj.activation_scale".endswith(quantization.unused)


def test_merged_linears_of_different_formats_are_refused() -> None:
    quantization = fine_grained({"ignored_layers": ["k_proj"]})
    with pytest.raises(ConfigError, match=r"linears of model\.layers\.0\.a different formats"):
        form_of(quantization, "model.layers.0.a", "q_proj", "k_proj")


def test_a_pattern_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'re:\(' is no regular expression"):
        compressed_tensors({**_COMPRESSED, "ignore": ["re:("]})


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    saved = build_fp8("block", "llama", tmp_path)
    path = Path(saved.fp8) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "hqq"}}))
    known = "unquantised weights, fp8, compressed-tensors, fbgemm_fp8, modelopt, awq, gptq, mxfp4"
    with pytest.raises(ConfigError, match=rf"\(hqq\) is not supported; supported: {known}"):
        make_engine(saved.fp8)
    with pytest.raises(ConfigError, match="'int8' is not supported; supported: fp8, int4"):
        make_engine(saved.reference, quantization="int8")


def test_a_quantised_checkpoint_is_not_converted_again(tmp_path: Path) -> None:
    saved = build_fp8("block", "llama", tmp_path)
    with pytest.raises(ConfigError, match=r"needs an unquantised checkpoint.*\(fp8\)"):
        make_engine(saved.fp8, quantization="fp8")


def test_a_missing_scale_and_an_unknown_tensor_are_refused(tmp_path: Path) -> None:
    path = Path(build_fp8("block", "llama", tmp_path).fp8) / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.up_proj.weight_scale_inv"
    scale = tensors.pop(name)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"no tensor {name}"):
        make_engine(str(path.parent))
    other = {"model.layers.0.mlp.other_scale": scale.clone()}
    save_file({**tensors, name: scale, **other}, path)
    with pytest.raises(ConfigError, match=r"does not use, such as model\.layers\.0\.mlp\.other"):
        make_engine(str(path.parent))


def test_scales_of_keys_and_values_are_left_out_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "minisgl"):
        make_engine(build_fp8("modelopt", "llama", tmp_path).fp8)
    layers, linears, ignored = 2, 7, 1
    count = layers * linears - ignored + 2 * layers  # input scales, k_scale and v_scale
    assert f"tensors not used count={count} such_as=model.layers.0.mlp.down" in caplog.text


def test_modelopt_settings_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    config = load_model_spec(build_fp8("modelopt", "llama", tmp_path).fp8)
    assert config.quantization is not None
    assert config.quantization["quant_method"] == "modelopt"
    assert config.quantization["quant_algo"] == "FP8"


def test_formats_of_the_caller_win() -> None:
    extensions = with_quantizations()
    mine = with_quantizations(
        type(extensions)(quantizations={"fp8": extensions.quantizations["modelopt"]})
    )
    assert mine.quantizations["fp8"] is extensions.quantizations["modelopt"]
