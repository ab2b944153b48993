"""The config of gpt-oss as it is published, without a dtype."""

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.kernel.activation import ClampedSwiglu
from minisgl.models.config import load_model_spec, model_spec_from

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {"modules_to_not_convert": ["lm_head"], "quant_method": "mxfp4"},
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_published_config_is_bfloat16_and_ends_with_a_call() -> None:
    generation = {"eos_token_id": [200002, 199999, 200012], "do_sample": True}
    model = model_spec_from(CONFIG, generation)
    assert model.dtype == "bfloat16"
    assert model.eos_token_ids == (199999, 200002, 200012)
    assert model.max_position == 131072
    (experts,) = set(model.experts)
    assert (experts.num_experts, experts.top_k) == (32, 4)
    assert (experts.activation, experts.renormalise) == (ClampedSwiglu(1.702, 7.0), True)
    assert [rule.window for rule in model.rules] == [128, None] * 12
    assert all(rule.sinks for rule in model.rules)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_dtype_in_the_config_counts(field: str) -> None:
    assert model_spec_from({**CONFIG, field: "float16"}).dtype == "float16"


def test_a_folder_without_generation_config_ends_with_a_call(tmp_path: Path) -> None:
    """The tokenizer has the ids of the end tokens. A generation_config.json counts before it."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert load_model_spec(str(tmp_path)).eos_token_ids == (200002,)
    texts = {199999: "<|endoftext|>", 200002: "<|return|>", 200005: "<|channel|>"}
    added = [{"id": i, "content": text} for i, text in (texts | {200012: "<|call|>"}).items()]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {}, "added_tokens": added}))
    assert load_model_spec(str(tmp_path)).eos_token_ids == (200002, 200012)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7]}')
    assert load_model_spec(str(tmp_path)).eos_token_ids == (7, 200002)
