"""Reading config.json: both spellings, defaults, and errors that name the setting."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from minisgl.core import ConfigError, EngineConfig
from minisgl.engine.memory import resolve_max_seq_len
from minisgl.layers.rotary import LinearRope, Llama3Rope, YarnRope, rope_table
from minisgl.models.config import ModelConfig, load_model_config, model_config_from

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


def config(generation: dict[str, Any] | None = None, **changes: Any) -> ModelConfig:
    return model_config_from(LLAMA | changes, generation)


def family(name: str, **changes: Any) -> ModelConfig:
    return config(architectures=[name], **changes)


def test_defaults_are_filled_in() -> None:
    model = config(num_key_value_heads=None)
    assert (model.kv_heads, model.head_dim, model.norm_eps) == (4, 16, 1e-5)
    assert (model.rope_theta, model.rope_scaling, model.max_position) == (10000.0, None, 512)
    assert (model.dtype, model.tied_embeddings, model.moe) == ("bfloat16", False, None)
    assert config(head_dim=32).head_dim == 32
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
    assert (model.qkv_bias, model.output_bias, model.mlp_bias) == (qkv, output, mlp)
    assert model.family.qk_norm == qk_norm


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
    assert model.moe is not None
    assert (model.moe.num_experts, model.moe.num_experts_per_tok) == (8, 2)
    assert [i for i in range(6) if model.moe.has_experts(i)] == [1, 5]


@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "old type"])
def test_rope_in_both_spellings(spelling: str) -> None:
    def rope(rope_type: str, **values: Any) -> ModelConfig:
        if spelling == "rope_parameters":
            parameters = {"rope_type": rope_type, "rope_theta": 5e5} | values
            return config(rope_parameters=parameters)
        key = "type" if spelling == "old type" else "rope_type"
        return config(rope_theta=5e5, rope_scaling={key: rope_type} | values)

    assert rope("default").rope_scaling is None
    assert rope("default").rope_theta == 5e5
    assert rope("linear", factor=4).rope_scaling == LinearRope(4.0)
    llama3 = rope(
        "llama3",
        factor=8,
        low_freq_factor=1,
        high_freq_factor=4,
        original_max_position_embeddings=128,
    )
    assert llama3.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 128)
    assert llama3.max_position == 512
    yarn = rope("yarn", factor=4.0, original_max_position_embeddings=512)
    assert yarn.rope_scaling == YarnRope(4.0, pytest.approx(1.138629), 512, 32.0, 1.0, True)
    assert yarn.max_position == 2048  # max_position_embeddings still has the original value
    explicit = rope("yarn", factor=4.0, attention_factor=0.9, beta_fast=16, truncate=False)
    assert explicit.rope_scaling == YarnRope(4.0, 0.9, 512, 16.0, 1.0, False)
    assert explicit.max_position == 512


def test_rope_in_both_spellings_at_once() -> None:
    """config.json may have both spellings, with equal values or with different settings."""
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    model = config(rope_scaling=old, rope_parameters=YARN | {"rope_theta": 5e5})
    assert (model.rope_theta, model.max_position) == (5e5, 512)
    assert isinstance(model.rope_scaling, YarnRope)
    assert config(rope_scaling=old, rope_parameters={"rope_theta": 5e5}) == model, "each its part"


def test_yarn_resolves_mscale_and_factor() -> None:
    scaling = {"rope_type": "yarn", "original_max_position_embeddings": 128}
    scaled = config(rope_scaling=scaling | {"mscale": 0.7, "mscale_all_dim": 0.35}).rope_scaling
    assert isinstance(scaled, YarnRope)
    assert scaled.factor == 4.0
    assert scaled.attention_factor == pytest.approx((0.07 * 1.386294 + 1) / (0.035 * 1.386294 + 1))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported; supported: Ll"),
        ({"architectures": None}, "names no architecture; supported: LlamaForCausalLM, "),
        ({"quantization_config": "awq"}, "quantization_config is 'awq': Expected `object"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' .* supported: silu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' .* supported: default, linear"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope settings: .* missing .* `factor`"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
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


SLIDING = {"sliding_window": 128}


@pytest.mark.parametrize(
    ("name", "changes", "window"),
    [
        ("MistralForCausalLM", SLIDING, 128),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("MistralForCausalLM", {}, None),
        ("MistralForCausalLM", {"sliding_window": 512}, None),
        ("Qwen2ForCausalLM", SLIDING, None),
        ("Qwen2ForCausalLM", SLIDING | {"use_sliding_window": True}, None),
        ("Qwen2ForCausalLM", SLIDING | {"use_sliding_window": True, "max_window_layers": 1}, 128),
        ("Qwen2ForCausalLM", SLIDING | {"use_sliding_window": True, "max_window_layers": 0}, 128),
        ("Qwen2ForCausalLM", SLIDING | {"max_window_layers": 0}, None),
        ("Qwen2ForCausalLM", SLIDING | {"layer_types": ["full_attention"] * 2}, None),
        ("Qwen2ForCausalLM", SLIDING | {"layer_types": ["sliding_attention"] * 2}, 128),
        ("Qwen3MoeForCausalLM", SLIDING | {"use_sliding_window": True}, 128),
    ],
)
def test_sliding_window_counts_only_where_it_acts(
    name: str, changes: dict[str, Any], window: int | None
) -> None:
    model = family(name, **changes)
    assert model.sliding_window == window
    engine = EngineConfig(model_path="unused")
    if window is None:
        assert resolve_max_seq_len(engine, model) == 512
    else:
        with pytest.raises(ConfigError, match=r"sliding_window 128 .* max_seq_len up to 128"):
            resolve_max_seq_len(engine, model)
        short = EngineConfig(model_path="unused", max_seq_len=128)
        assert resolve_max_seq_len(short, model) == 128


def test_mistral_without_a_sliding_window_has_the_default_of_transformers() -> None:
    """An absent sliding_window means the default of its configuration class; null means none."""
    default = transformers.MistralConfig().sliding_window
    assert family("MistralForCausalLM", max_position_embeddings=32768).sliding_window == default
    said = family("MistralForCausalLM", max_position_embeddings=32768, sliding_window=None)
    assert said.sliding_window is None


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
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="JSON object"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_model_config(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [4]}')
    assert load_model_config(str(tmp_path)).eos_token_ids == (2, 4)


def test_plain_rope_table_equals_its_definition() -> None:
    table = rope_table(10000.0, 8, None, 100, torch.device("cpu"))
    assert table.shape == (100, 8)
    angles = [99 * 10000.0 ** (-i / 8) for i in (0, 2, 4, 6)]
    expected = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(table[99, :4].double(), expected.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(table[99, 4:].double(), expected.sin(), atol=1e-5, rtol=0)
