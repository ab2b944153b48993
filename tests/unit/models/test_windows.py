"""The layers with a sliding window in config.json, and their KV pools."""

from typing import Any

import pytest
import torch
import transformers

from minisgl.attention.base import AttentionRule
from minisgl.core import EngineConfig
from minisgl.distributed.comm import TPInfo
from minisgl.engine.memory import resolve
from minisgl.layers.rotary import LinearRope, Rope
from minisgl.models.config import model_spec_from
from tests.unit.models.test_config import config, family

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
        ("Phi3ForCausalLM", SLIDING, 128),
        ("Phi3ForCausalLM", {}, None),
        ("Ministral3ForCausalLM", SLIDING, 128),
        ("SmolLM3ForCausalLM", SLIDING, None),
    ],
)
def test_sliding_window_counts_only_where_it_acts(
    name: str, changes: dict[str, Any], window: int | None
) -> None:
    model = family(name, **changes)
    engine, tp, device = EngineConfig(model_path="unused"), TPInfo(0, 1), torch.device("cpu")
    served = resolve(engine, model, tp, device).model
    assert served.rules[-1].window == window
    # A window that holds the whole served context has no effect.
    assert model.for_context(128).rules == (AttentionRule(),) * 2


def layer_type(rule: AttentionRule) -> str:
    """The name of these layers in layer_types."""
    return "full_attention" if rule.window is None else "sliding_attention"


def test_windows_are_on_the_layers_that_transformers_chooses() -> None:
    """Every way in which a config.json says which layers have a window."""
    for name, kind, changes in (
        ("Qwen2ForCausalLM", transformers.Qwen2Config, {"use_sliding_window": True}),
        ("Gemma2ForCausalLM", transformers.Gemma2Config, {}),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig, {}),
        ("Gemma3ForCausalLM", transformers.Gemma3TextConfig, {"sliding_window_pattern": 3}),
        ("Olmo3ForCausalLM", transformers.Olmo3Config, {}),
        ("GptOssForCausalLM", transformers.GptOssConfig, {}),
    ):
        asked: dict[str, Any] = {"num_hidden_layers": 9, "sliding_window": 32, **changes}
        asked["max_window_layers"] = 4
        model = family(name, **asked, num_experts=4, num_experts_per_tok=2)
        expected = kind(**asked).layer_types
        assert [layer_type(rule) for rule in model.rules] == expected, name


def test_the_config_of_gemma_3_by_earlier_versions_of_transformers() -> None:
    """Published checkpoints name only the fields that differ from the defaults of that version."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 6,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "torch_dtype": "bfloat16"}
    model = model_spec_from({**outer, "text_config": text, "vision_config": {}})
    expected = transformers.Gemma3TextConfig(**text)
    kv = model.kv_specs[0]
    assert (model.vocab_size, kv.head_dim, model.tied_embeddings) == (262208, 256, True)
    assert (model.q_heads, kv.kv_heads, model.max_position) == (8, 4, 131072)
    assert [rule.window for rule in model.rules] == [1024] * 5 + [None]
    used = {layer_type(mixer.rule): mixer.rope for mixer in model.attention}
    assert used["sliding_attention"] == Rope(1e4, None, 256)
    assert used["full_attention"] == Rope(1e6, LinearRope(8.0), 256)
    for kind, rope in used.items():
        assert rope.theta == expected.rope_parameters[kind]["rope_theta"]
    assert model.multipliers.embedding == 50.5, "the square root of 2560, in bfloat16"


def test_mistral_without_a_sliding_window_has_the_default_of_transformers() -> None:
    """An absent sliding_window means the default of its configuration class; null means none."""
    default = transformers.MistralConfig().sliding_window
    model = family("MistralForCausalLM", max_position_embeddings=32768)
    assert [rule.window for rule in model.rules] == [default] * 2
    said = family("MistralForCausalLM", max_position_embeddings=32768, sliding_window=None)
    assert [rule.window for rule in said.rules] == [None] * 2


def test_layers_with_and_without_a_window_have_pools_of_their_own() -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = family("Olmo3ForCausalLM", sliding_window=8, layer_types=kinds)
    assert (model.window, model.pools) == (8, ((1,), (0,)))
    assert (model.for_context(8).window, model.for_context(8).pools) == (None, ((0, 1),))
    all_windows = family("MistralForCausalLM", sliding_window=8)
    assert (all_windows.window, all_windows.pools) == (8, ((), (0, 1)))
    assert (config().window, config().pools) == (None, ((0, 1),))
