"""Headers of published checkpoints: the loader takes every name, shape and type, and leaves none.

tests/data/checkpoints has the tensors of one layer of each kind, with their sources. The files that
the test writes have these headers and no values on the disk.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import ConfigError
from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.layers.delta import DeltaSpec
from minisgl.models.build import empty_model
from minisgl.models.config import model_spec_from
from minisgl.models.loader import load_weights, materialise
from minisgl.moe.torch_backend import TorchMoe
from minisgl.quantization import with_quantizations

DATA = Path(__file__).parents[2] / "data" / "checkpoints"
# Billions of parameters of the language model, and the dtypes that the kernels read.
SIZES = {
    "qwen3.6-27b": 26.9,
    "qwen3.6-27b-fp8": 26.9,
    "qwen3.6-35b-a3b": 34.7,
    "qwen3.6-35b-a3b-fp8": 34.7,
    "qwen3-next-80b-a3b-instruct": 79.7,
    "qwen3-next-80b-a3b-instruct-fp8": 79.7,
}
BYTES = {"BF16": 2, "F8_E4M3": 1}
META = torch.device("meta")
Tensors = dict[str, tuple[str, list[int]]]


def read(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((DATA / f"{name}.json").read_text())
    return result


def cut(published: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the checkpoint with its first layers alone."""
    config = published["config"]
    text = config.get("text_config", config)
    fewer = {**text, "num_hidden_layers": layers}
    if "layer_types" in text:
        fewer["layer_types"] = text["layer_types"][:layers]
    whole = {**config, "text_config": fewer} if "text_config" in config else fewer
    return published | {"config": whole}


def with_encoder(published: dict[str, Any]) -> dict[str, Any]:
    """Add the image encoder to a published checkpoint whose hidden size is 5120."""
    encoder = read("qwen3.6-encoder")
    config = published["config"] | {"vision_config": encoder["vision_config"]}
    blocks = {
        f"model.visual.blocks.{block}.{name}": tensor
        for block in range(encoder["vision_config"]["depth"])
        for name, tensor in encoder["block"].items()
    }
    rest = {f"model.visual.{name}": tensor for name, tensor in encoder["rest"].items()}
    return published | {"config": config, "unread": published["unread"] | blocks | rest}


def files(published: dict[str, Any]) -> Iterator[Tensors]:
    """Yield the tensors of each file: one for each layer, and one for the rest."""
    config = published["config"]
    config = config.get("text_config", config)
    for layer in range(config["num_hidden_layers"]):
        kind = "linear_attention" if (layer + 1) % 4 else "full_attention"
        parent, found = f"{published['prefix']}layers.{layer}", {}
        for name, tensor in (published[kind] | published["mlp"]).items():
            experts = range(config["num_experts"]) if "{expert}" in name else [0]
            for expert in experts:
                found[f"{parent}.{name.replace('{expert}', str(expert))}"] = tensor
        yield found
    heads = published["full_attention"] | published["mlp"]
    drafts: Tensors = {}
    for name, tensor in heads.items():
        experts = range(config["num_experts"]) if "{expert}" in name else [0]
        for expert in experts:
            drafts[f"mtp.layers.0.{name.replace('{expert}', str(expert))}"] = tensor
    yield published["rest"] | published["unread"] | drafts


def write(folder: Path, published: dict[str, Any], extra: Tensors, missing: str = "") -> None:
    """Write sparse safetensors files with these headers, and without the tensor `missing`."""
    for number, tensors in enumerate(files(published)):
        header, end = {}, 0
        for name, (dtype, shape) in (tensors | (extra if number == 0 else {})).items():
            if name != missing:
                begin, end = end, end + BYTES[dtype] * math.prod(shape)
                header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        with (folder / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)


def check(
    folder: Path, config: dict[str, Any], tp: TPInfo, drafts: bool = False, images: bool = False
) -> torch.nn.Module:
    """Compare the headers with a rank's share of the model. Raises ConfigError."""
    spec, moe = model_spec_from(config, drafts=drafts, images=images), TorchMoe(META)
    comm = SingleCommunicator(tp)
    model, unused = empty_model(spec, torch.bfloat16, comm, moe, with_quantizations())
    materialise(model, META, torch.bfloat16)
    load_weights(model, str(folder), unused=unused, headers_only=True)
    return model


@pytest.mark.parametrize("name", SIZES)
def test_the_loader_takes_each_tensor_of_a_published_checkpoint(name: str, tmp_path: Path) -> None:
    """The layers repeat after four: three recurrent ones and one with full attention."""
    published = read(name)
    config = published["config"]
    repeats = config.get("text_config", config)["num_hidden_layers"] // 4
    published = cut(published, 4)
    write(tmp_path, published, {})
    drafting = dict(
        check(tmp_path, published["config"], TPInfo(0, 1), drafts=True).named_parameters()
    )
    weights = [
        parameter.numel() * (repeats if full.startswith("model.layers.") else 1)
        for full, parameter in drafting.items()
        if not full.startswith("mtp.")
        and not full.endswith(("scales", "gate_up_scales", "down_scales"))
    ]
    assert sum(weights) / 1e9 == pytest.approx(SIZES[name], abs=0.06)
    plain = dict(check(tmp_path, published["config"], TPInfo(0, 1)).named_parameters())
    check(tmp_path, published["config"], TPInfo(1, 2))
    added = drafting.keys() - plain.keys()
    assert {name.partition(".")[0] for name in added} == {"mtp"}


@pytest.mark.parametrize("name", ["qwen3.6-27b", "qwen3.6-27b-fp8"])
def test_rank_0_alone_holds_the_published_image_encoder_whole(name: str, tmp_path: Path) -> None:
    published = cut(with_encoder(read(name)), 4)
    write(tmp_path, published, {"model.visual.other.weight": ("BF16", [2])})
    config = published["config"]
    check(tmp_path, config, TPInfo(0, 1))  # without images no name of the encoder is read
    with pytest.raises(ConfigError, match=r"such as model\.visual\.other\.weight"):
        check(tmp_path, config, TPInfo(0, 1), images=True)
    write(tmp_path, published, {}, missing="model.visual.blocks.26.attn.qkv.bias")
    with pytest.raises(ConfigError, match=r"no tensor model\.visual\.blocks\.26\.attn\.qkv\.bias"):
        check(tmp_path, config, TPInfo(0, 1), images=True)
    write(tmp_path, published, {})
    encoder, other = (
        [p for name, p in model.named_parameters() if name.startswith("encoder.")]
        for model in (check(tmp_path, config, TPInfo(rank, 2), images=True) for rank in (0, 1))
    )
    assert not other
    spec = model_spec_from(config, images=True).encoder
    assert spec is not None
    assert sum(parameter.numel() for parameter in encoder) == spec.weights
    assert {parameter.dtype for parameter in encoder} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"out_hidden_size": 3584}, "out_hidden_size 3584 is not supported; supported: 5120"),
        ({"hidden_act": "silu"}, "vision_config.hidden_act 'silu' is not supported"),
        ({"num_position_embeddings": 2300}, "num_position_embeddings 2300 is not supported"),
        ({"num_heads": 36 * 3}, "hidden_size 1152 is not a multiple of 4 \\* num_heads 108"),
        ({"patch_size": 0}, "vision_config: patch_size is 0"),
    ],
)
def test_settings_of_an_image_encoder_are_checked(changes: dict[str, Any], says: str) -> None:
    config = with_encoder(read("qwen3.6-27b"))["config"]
    broken = {**config, "vision_config": config["vision_config"] | changes}
    model_spec_from(broken)  # without images, no setting of the encoder counts
    with pytest.raises(ConfigError, match=says):
        model_spec_from(broken, images=True)


def test_a_missing_or_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    published = cut(read("qwen3.6-27b-fp8"), 8)
    lost = "model.language_model.layers.5.linear_attn.in_proj_z.weight_scale_inv"
    write(tmp_path, published, {}, missing=lost)
    with pytest.raises(ConfigError, match=r"no tensor model\.layers\.5\.linear_attn\.in_proj_z\.w"):
        check(tmp_path, published["config"], TPInfo(0, 1))
    scale = "model.language_model.layers.0.linear_attn.in_proj_a.weight_scale_inv"
    write(tmp_path, published, {scale: ("BF16", [1, 40])})
    with pytest.raises(ConfigError, match=r"such as model\.layers\.0\.linear_attn\.in_proj_a\.w"):
        check(tmp_path, published["config"], TPInfo(0, 1))


def test_the_specs_of_qwen3_6_27b() -> None:
    spec = model_spec_from(read("qwen3.6-27b")["config"])
    assert [type(layer.mixer) is DeltaSpec for layer in spec.layers] == [*[True] * 3, False] * 16
    assert spec.states[47] == DeltaSpec(16, 48, 128, 128, 47)
    (rope,) = spec.ropes
    head_dim = spec.kv_specs[0].head_dim
    assert (rope.rotary_dim, rope.theta, head_dim, spec.max_position) == (64, 1e7, 256, 262144)
    assert spec.attention[15].gate
    assert spec.pools == (tuple(range(16)),)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"output_gate_type": "sigmoid"}, "output_gate_type 'sigmoid' is not supported"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype 'bfloat16' is not supported"),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim 3 is not supported"),
        ({"linear_num_value_heads": 40}, "40 is not a multiple of linear_num_key_heads 16"),
        ({"layer_types": ["linear_attention"] * 64}, "needs a layer of type 'full_attention'"),
        ({"layer_types": ["sliding_attention"] * 64}, "layer type 'sliding_attention'"),
    ],
)
def test_settings_of_gated_delta_nets_are_checked(changes: dict[str, Any], says: str) -> None:
    config = read("qwen3.6-27b")["config"]
    with pytest.raises(ConfigError, match=says):
        model_spec_from({**config, "text_config": config["text_config"] | changes})
