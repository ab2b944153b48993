"""Reading config.json: both spellings, defaults, and errors that name the setting."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import ConfigError
from minisgl.layers.mlp import DenseSpec
from minisgl.layers.rotary import LinearRope, Llama3Rope, Rope, YarnRope, rope_table
from minisgl.models.config import load_model_spec, model_spec_from
from minisgl.models.loader import text_tensors
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


def config(generation: dict[str, Any] | None = None, **changes: Any) -> ModelSpec:
    return model_spec_from(LLAMA | changes, generation)


def family(name: str, **changes: Any) -> ModelSpec:
    return config(architectures=[name], **changes)


def test_defaults_are_filled_in() -> None:
    model = config(num_key_value_heads=None)
    kv = model.kv_specs[0]
    assert (kv.kv_heads, kv.head_dim, model.norm_eps) == (4, 16, 1e-5)
    assert (model.ropes, model.max_position) == ((Rope(10000.0, None, 16),), 512)
    assert (model.dtype, model.tied_embeddings, model.experts) == ("bfloat16", False, ())
    assert config(head_dim=32).kv_specs[0].head_dim == 32
    assert config(dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("name", "changes", "qkv", "output", "mlp", "qk_norm"),
    [
        ("LlamaForCausalLM", {}, False, False, False, False),
        ("LlamaForCausalLM", {"attention_bias": True}, True, True, False, False),
        ("LlamaForCausalLM", {"mlp_bias": True}, False, False, True, False),
        ("MistralForCausalLM", {"attention_bias": True}, False, False, False, False),
        ("Qwen2ForCausalLM", {}, True, False, False, False),
        ("Qwen3ForCausalLM", {}, False, False, False, True),
        ("Qwen3ForCausalLM", {"attention_bias": True}, True, True, False, True),
    ],
)
def test_families_differ_in_biases_and_norms(
    name: str, changes: dict[str, Any], qkv: bool, output: bool, mlp: bool, qk_norm: bool
) -> None:
    model = family(name, **changes)
    mixer, dense = model.layers[0].mixer, model.layers[0].mlp
    assert isinstance(dense, DenseSpec)
    assert (mixer.qkv_bias, mixer.output_bias, dense.bias) == (qkv, output, mlp)
    assert (mixer.qk_norm is not None) == qk_norm


@pytest.mark.parametrize("experts_key", ["num_experts", "num_local_experts"])
def test_moe_fields(experts_key: str) -> None:
    model = family(
        "Qwen3MoeForCausalLM",
        num_hidden_layers=6,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        **{experts_key: 8},
    )
    sparse = [isinstance(layer.mlp, ExpertsSpec) for layer in model.layers]
    assert sparse == [False, True, False, False, False, True]
    assert set(model.experts) == {ExpertsSpec(8, 2, 48, renormalise=True)}


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "old type"])
def test_rope_in_both_spellings(spelling: str) -> None:
    def rope(rope_type: str, **values: Any) -> ModelSpec:
        if spelling == "rope_parameters":
            parameters = {"rope_type": rope_type, "rope_theta": 5e5} | values
            return config(rope_parameters=parameters)
        key = "type" if spelling == "old type" else "rope_type"
        return config(rope_theta=5e5, rope_scaling={key: rope_type} | values)

    assert rope("default").ropes[0].scaling is None
    assert rope("default").ropes[0].theta == 5e5
    assert rope("linear", factor=4).ropes[0].scaling == LinearRope(4.0)
    llama3 = rope(
        "llama3",
        factor=8,
        low_freq_factor=1,
        high_freq_factor=4,
        original_max_position_embeddings=128,
    )
    assert llama3.ropes[0].scaling == Llama3Rope(8.0, 1.0, 4.0, 128)
    assert llama3.max_position == 512
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=512)
    assert yarn.ropes[0].scaling == YarnRope(4.0, pytest.approx(1.138629), 512, 32.0, 1.0, True)
    assert yarn.max_position == 2048  # max_position_embeddings still has the original value
    explicit = rope("yarn", factor=4.0, attention_factor=0.9, beta_fast=16, truncate=False)
    assert explicit.ropes[0].scaling == YarnRope(4.0, 0.9, 512, 16.0, 1.0, False)
    assert explicit.max_position == 512


def test_rope_in_both_spellings_at_once() -> None:
    """config.json may have both spellings, with equal values or with different settings."""
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    model = config(rope_scaling=old, rope_parameters=YARN | {"rope_theta": 5e5})
    assert (model.ropes[0].theta, model.max_position) == (5e5, 512)
    assert isinstance(model.ropes[0].scaling, YarnRope)
    assert config(rope_scaling=old, rope_parameters={"rope_theta": 5e5}) == model, "each its part"


def test_yarn_resolves_mscale_and_factor() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    scaled = config(rope_scaling=scaling | {"mscale": 0.7, "mscale_all_dim": 0.35}).ropes[0].scaling
    assert isinstance(scaled, YarnRope)
    assert scaled.factor == 4.0
    assert scaled.attention_factor == pytest.approx((0.07 * 1.386294 + 1) / (0.035 * 1.386294 + 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"architectures": ["SurpriseForCausalLM"]},
            "^architecture SurpriseForCausalLM is not supported; docs/models.md lists",
        ),
        (
            {"architectures": ["MistralXForCausalLM"]},
            "not supported; the nearest supported one is MistralForCausalLM; docs/models.md lists",
        ),
        ({"architectures": None}, "names no architecture; docs/models.md lists"),
        ({"quantization_config": "awq"}, "quantization_config is 'awq': Expected `object"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* supported: silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' .* supported: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope settings: .* missing .* `factor`"),
        ({"rope_parameters": {"linear_attention": {"rope_theta": 1e4}}}, "by layer type"),
        ({"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "disagree"),
        ({"rope_parameters": YARN, "rope_scaling": YARN | {"factor": 2.0}}, "disagree"),
        ({"rope_parameters": YARN, "rope_scaling": {"type": "linear", "factor": 4.0}}, "disagree"),
        ({"rope_theta": 0}, "rope_theta must be above 1"),
        ({"rope_theta": float("nan")}, r"config\.json: rope_theta is nan: Expected `float`"),
        ({"rms_norm_eps": 10**400}, r"rms_norm_eps is 1000.*: Number out of range"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 0}},
            "rope settings: factor is 0: Expected `float` > 0.0",
        ),
        (
            {"rope_scaling": YARN | {"attention_factor": "x"}},
            "attention_factor is 'x': Expected `float",
        ),
        ({"rope_scaling": YARN | {"beta_fast": 0}}, "beta_fast is 0: Expected `float` > 0.0"),
        ({"rope_scaling": YARN | {"factor": float("inf")}}, "factor is inf: Expected `float` < "),
        ({"dtype": "float64"}, "dtype 'float64'"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"head_dim": 15}, "head_dim 15 is not even"),
        ({"hidden_size": 3}, "head_dim 0 is not even"),
        ({"vocab_size": None}, r"config\.json: Object missing required field `vocab_size`"),
        ({"vocab_size": "many"}, "vocab_size is 'many': Expected `int`, got `str`"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True: Expected `int`, got `bool`"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000: Expected `int` <= 10000"),
        ({"hidden_size": 10**30}, "hidden_size is 10+: "),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 10**9},
            "num_experts is 1000000000: Expected `int` <= 10000",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0: Expected `int` >= 1"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1: Expected `bool`, got `int`"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention'"),
        ({"eos_token_id": "</s>"}, r"eos_token_id is '</s>': Expected `int \| array`, got `str`"),
        ({"eos_token_id": [True]}, r"eos_token_id is \[True\]: Expected `int`, got `bool`"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 0},
            "sliding_window is 0: expected an integer >= 1",
        ),
    ],
)
def test_unsupported_or_malformed_settings_are_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config(**changes)


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("Phi3ForCausalLM", {"partial_rotary_factor": 1.5}, "above 0 and at most 1, not 1.5"),
        ("Phi3ForCausalLM", {"partial_rotary_factor": 0.2}, "3 rotary elements of a head"),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONGROPE, "partial_rotary_factor": 0.5},
            "longrope has 8 factors; expected 4",
        ),
        (
            "Phi3ForCausalLM",
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 1},
            "original_max_position_embeddings must be above 1",
        ),
        (
            "Exaone4ForCausalLM",
            {"sliding_window": 16, "layer_types": 5},
            r"layer_types is 5: Expected `array \| null`, got `int`",
        ),
        (
            "Gemma3ForCausalLM",
            {"sliding_window": 16, "sliding_window_pattern": 0},
            "sliding_window_pattern is 0: expected 1 or more",
        ),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "has 1 entries; expected 2"),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, "residual_multiplier is 0: Expected"),
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "gemma"}},
            "language model 'gemma' is not supported; known: mistral, ministral3",
        ),
        ("Mistral3ForConditionalGeneration", {}, "Mistral3ForConditionalGeneration is not supp"),
        (
            "Qwen2MoeForCausalLM",
            {"shared_expert_intermediate_size": 60, "moe_intermediate_size": 40},
            "intermediate_size 60 .*: expected a multiple of moe_intermediate_size 40",
        ),
    ],
)
def test_settings_of_single_families_are_checked(
    name: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        family(name, **changes)


def test_layers_choose_their_rotary_embedding() -> None:
    def kinds(name: str, **changes: Any) -> list[int]:
        model = family(name, num_hidden_layers=4, **changes)
        return [mixer.rope.rotary_dim for mixer in model.attention]

    assert kinds("SmolLM3ForCausalLM") == [16, 16, 16, 0]
    assert kinds("SmolLM3ForCausalLM", no_rope_layer_interval=2) == [16, 0, 16, 0]
    assert kinds("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1]) == [0, 16, 16, 16]
    layers = ["sliding_attention", "full_attention"] * 2
    windows: dict[str, Any] = {"sliding_window": 512, "layer_types": layers}
    assert kinds("Exaone4ForCausalLM", **windows) == [16, 0, 16, 0]
    assert kinds("Exaone4ForCausalLM", layer_types=["full_attention"] * 4) == [16] * 4
    assert kinds("Phi3ForCausalLM", partial_rotary_factor=0.75) == [12] * 4


def test_the_list_of_longrope_depends_on_the_served_context() -> None:
    settings = LONGROPE | {"original_max_position_embeddings": 64}
    model = family("Phi3ForCausalLM", rope_scaling=settings)
    (rope,) = model.ropes
    short, long = (rope_table(rope, 16, context, torch.device("cpu")) for context in (64, 65))
    plain = rope_table(Rope(10000.0, None, 16), 16, 65, torch.device("cpu"))
    factor = (1 + math.log(512 / 64) / math.log(64)) ** 0.5
    assert torch.allclose(short, plain[:64] * factor)
    assert torch.allclose(long[::2], plain[:33] * factor, atol=1e-5)


def test_the_config_of_a_language_model_beside_an_encoder() -> None:
    text = {**LLAMA, "model_type": "mistral", "sliding_window": None}
    del text["architectures"]
    outer = {"architectures": ["Mistral3ForConditionalGeneration"], "dtype": "float16"}
    model = model_spec_from({**outer, "text_config": text, "vision_config": {}})
    assert (model.hidden_size, model.num_layers, model.dtype) == (64, 2, "float16")


def test_null_in_text_config_does_not_replace_a_setting_of_the_outer_config() -> None:
    text = {**LLAMA, "model_type": "mistral", "dtype": None, "quantization_config": None}
    outer = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "dtype": "float16",
        "quantization_config": {"quant_method": "fp8"},
    }
    model = model_spec_from({**outer, "text_config": text})
    assert (model.dtype, model.quantization) == ("float16", {"quant_method": "fp8"})


def test_the_tensors_of_a_language_model_beside_an_encoder() -> None:
    plain = {"model.norm.weight", "lm_head.weight"}
    assert text_tensors(plain) == {name: name for name in plain}
    old = {"language_model.model.norm.weight", "language_model.lm_head.weight", "vision_tower.x"}
    assert text_tensors(old) == {
        "model.norm.weight": "language_model.model.norm.weight",
        "lm_head.weight": "language_model.lm_head.weight",
    }
    new = {"model.language_model.norm.weight", "lm_head.weight", "model.vision_tower.x"}
    assert text_tensors(new) == {
        "model.norm.weight": "model.language_model.norm.weight",
        "lm_head.weight": "lm_head.weight",
    }


def test_eos_ids_of_both_files_are_united() -> None:
    assert config({"eos_token_id": [7, 2, 5]}).eos_token_ids == (2, 5, 7)
    assert config({}, eos_token_id=None).eos_token_ids == ()
    assert config({"eos_token_id": 9}, eos_token_id=[3]).eos_token_ids == (3, 9)
    beyond = config({"eos_token_id": 1000}, eos_token_id=[3, 2**70])  # larger than the vocabulary
    assert beyond.eos_token_ids == (3,)


def test_sampling_defaults_come_from_generation_config() -> None:
    model = config({"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05})
    expected = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert model.sampling_defaults == expected
    greedy = config({"do_sample": False, "temperature": 0.6})
    assert greedy.sampling_defaults == {"temperature": 0.0}
    assert config().sampling_defaults == {}
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: top_k is inf: Expected `float`"
    ):
        config({"top_k": float("inf")})


def test_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model_spec(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4]}')
    assert load_model_spec(str(tmp_path)).eos_token_ids == (2, 4)


def test_plain_rope_table_equals_its_definition() -> None:
    table = rope_table(Rope(10000.0, None, 8), 8, 100, torch.device("cpu"))
    assert table.shape == (100, 8)
    angles = [99 * 10000.0 ** (-i / 8) for i in (0, 2, 4, 6)]
    expected = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(table[99, :4].double(), expected.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(table[99, 4:].double(), expected.sin(), atol=1e-5, rtol=0)
