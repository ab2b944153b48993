"""Tiny configurations of the families before 2026."""

from collections.abc import Callable
from typing import Any

import transformers

VOCAB_SIZE = 151  # odd, so that two ranks need padding
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough for peaked logits, so that greedy has no ties
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 8,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.5 + 0.3 * i for i in range(8)],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
}


def _llama(**kwargs: Any) -> Any:
    return transformers.LlamaConfig(**BASE | kwargs)


def _mistral(**kwargs: Any) -> Any:
    return transformers.MistralConfig(**BASE | {"sliding_window": None} | kwargs)


def _qwen2(**kwargs: Any) -> Any:
    return transformers.Qwen2Config(**BASE | kwargs)


def _qwen3(**kwargs: Any) -> Any:
    return transformers.Qwen3Config(**BASE | {"head_dim": 32} | kwargs)


def _qwen3_moe(**kwargs: Any) -> Any:
    return transformers.Qwen3MoeConfig(**BASE | {"head_dim": 16} | EXPERTS | kwargs)


def _phi3(**kwargs: Any) -> Any:
    tokens = {"pad_token_id": 0, "num_attention_heads": 4}
    return transformers.Phi3Config(**BASE | tokens | kwargs)


def _granite(**kwargs: Any) -> Any:
    factors = {
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.1,
        "residual_multiplier": 0.22,
        "logits_scaling": 0.25,
    }
    return transformers.GraniteConfig(**BASE | factors | kwargs)


def _smollm3(**kwargs: Any) -> Any:
    return transformers.SmolLM3Config(**BASE | {"pad_token_id": 0} | kwargs)


def _exaone4(**kwargs: Any) -> Any:
    layers = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
    return transformers.Exaone4Config(**BASE | layers | kwargs)


def _qwen2_moe(**kwargs: Any) -> Any:
    experts = EXPERTS | {"shared_expert_intermediate_size": 120}
    return transformers.Qwen2MoeConfig(**BASE | experts | kwargs)


def _ministral3(**kwargs: Any) -> Any:
    return transformers.Ministral3Config(**BASE | {"head_dim": 32} | kwargs)


def _seed_oss(**kwargs: Any) -> Any:
    return transformers.SeedOssConfig(**BASE | {"head_dim": 32} | kwargs)


_TWO_KINDS = ["sliding_attention", "full_attention"]
_LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}


def _gemma3(**kwargs: Any) -> Any:
    sizes = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9, "pad_token_id": 0}
    layers = {"layer_types": _TWO_KINDS}
    return transformers.Gemma3TextConfig(**BASE | sizes | layers | kwargs)


def _gemma2(**kwargs: Any) -> Any:
    sizes = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 9, "pad_token_id": 0}
    return transformers.Gemma2Config(**BASE | sizes | {"layer_types": _TWO_KINDS} | kwargs)


def _olmo3(**kwargs: Any) -> Any:
    layers = {"sliding_window": 9, "layer_types": _TWO_KINDS}
    return transformers.Olmo3Config(**BASE | layers | kwargs)


def _gpt_oss(**kwargs: Any) -> Any:
    sizes = {"head_dim": 32, "sliding_window": 9, "layer_types": _TWO_KINDS}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40}
    return transformers.GptOssConfig(**BASE | sizes | experts | kwargs)


def _with_encoder(text: Any) -> Any:
    """A checkpoint with an image encoder, whose tensors the engine leaves out."""
    vision = transformers.PixtralVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    return transformers.Mistral3Config(
        text_config=text, vision_config=vision, tie_word_embeddings=False
    )


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama-llama3-tied": lambda: _llama(rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "llama-linear-biases": lambda: _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        attention_bias=True,
        mlp_bias=True,
    ),
    "mistral": lambda: _mistral(num_key_value_heads=1, head_dim=32),
    "qwen2": _qwen2,
    "qwen2-yarn-tied": lambda: _qwen2(rope_parameters=YARN, tie_word_embeddings=True),
    "qwen3": _qwen3,
    "qwen3-yarn-mscale": lambda: _qwen3(
        rope_parameters=YARN
        | {"mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 16, "truncate": False},
    ),
    "qwen3-wide": lambda: _qwen3(head_dim=128),
    "qwen3-moe-wide": lambda: _qwen3_moe(head_dim=128, norm_topk_prob=True),
    "qwen3-moe": lambda: _qwen3_moe(norm_topk_prob=True),
    "qwen3-moe-mixed": lambda: _qwen3_moe(  # sizes that 2 and 4 ranks do not divide
        num_hidden_layers=3, mlp_only_layers=[1], intermediate_size=97, moe_intermediate_size=39
    ),
    "qwen2-moe": lambda: _qwen2_moe(),
    "qwen2-moe-mixed": lambda: _qwen2_moe(
        moe_intermediate_size=39,
        shared_expert_intermediate_size=78,
        decoder_sparse_step=2,
        norm_topk_prob=True,
    ),
    "qwen2-moe-tied": lambda: _qwen2_moe(num_key_value_heads=4, tie_word_embeddings=True),
    "phi3": _phi3,
    "phi3-partial-tied": lambda: _phi3(partial_rotary_factor=0.75, tie_word_embeddings=True),
    # Every prompt is longer than the original context, so transformers uses the long factors.
    "phi3-longrope": lambda: _phi3(
        rope_parameters=_LONGROPE, num_attention_heads=2, original_max_position_embeddings=8
    ),
    "phi3-longrope-short": lambda: _phi3(
        rope_parameters=_LONGROPE | {"original_max_position_embeddings": 4096},
        num_attention_heads=2,
        num_key_value_heads=1,
    ),
    "ministral3": lambda: _ministral3(),
    "ministral3-yarn": lambda: _ministral3(
        rope_parameters=YARN | {"llama_4_scaling_beta": 0.3}, tie_word_embeddings=True
    ),
    "ministral3-vision": lambda: _with_encoder(_ministral3()),
    "mistral3-vision": lambda: _with_encoder(_mistral(head_dim=32)),
    "granite": _granite,
    "granite-biases-tied": lambda: _granite(
        attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "granite-wide": lambda: _granite(
        embedding_multiplier=0.5, residual_multiplier=1.5, num_key_value_heads=4
    ),
    "smollm3": lambda: _smollm3(num_hidden_layers=4),
    "smollm3-listed-tied": lambda: _smollm3(no_rope_layers=[0, 1], tie_word_embeddings=True),
    "smollm3-biases": lambda: _smollm3(
        no_rope_layer_interval=2, attention_bias=True, rope_parameters=YARN
    ),
    "seed-oss": lambda: _seed_oss(),
    "seed-oss-biases": lambda: _seed_oss(attention_out_bias=True, mlp_bias=True),
    "seed-oss-plain-tied": lambda: _seed_oss(attention_bias=False, tie_word_embeddings=True),
    "olmo2": lambda: transformers.Olmo2Config(**BASE),
    "olmo2-biases-tied": lambda: transformers.Olmo2Config(
        **BASE | {"num_key_value_heads": 4, "attention_bias": True, "tie_word_embeddings": True}
    ),
    "olmo2-one-key-head": lambda: transformers.Olmo2Config(**BASE | {"num_key_value_heads": 1}),
    "exaone4": lambda: _exaone4(rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "exaone4-windows": lambda: _exaone4(  # the window is as long as the context
        sliding_window=512, layer_types=["sliding_attention", "full_attention"]
    ),
    "exaone4-short-windows": lambda: _exaone4(
        sliding_window=9,
        num_hidden_layers=4,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        rope_parameters=_LLAMA3,
    ),
    "exaone4-window-of-one": lambda: _exaone4(
        sliding_window=1, layer_types=_TWO_KINDS, num_key_value_heads=4
    ),
    "exaone4-two-windows-tied": lambda: _exaone4(
        sliding_window=40, layer_types=["sliding_attention"] * 2, tie_word_embeddings=True
    ),
    "mistral-window": lambda: _mistral(sliding_window=17, head_dim=32),
    "mistral-short-window": lambda: _mistral(sliding_window=3, num_key_value_heads=1),
    "mistral-window-yarn-tied": lambda: _mistral(
        sliding_window=64, rope_parameters=YARN, tie_word_embeddings=True
    ),
    "qwen2-window": lambda: _qwen2(
        sliding_window=9, use_sliding_window=True, max_window_layers=1, num_hidden_layers=3
    ),
    "gemma3": lambda: _gemma3(tie_word_embeddings=True),
    "gemma3-linear": lambda: _gemma3(
        rope_parameters={
            "full_attention": _LINEAR,
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
        num_key_value_heads=1,
        sliding_window=30,
    ),
    "gemma3-capped": lambda: _gemma3(
        final_logit_softcapping=3.0,
        num_hidden_layers=7,
        layer_types=None,
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "gemma2": lambda: _gemma2(tie_word_embeddings=True),
    "gemma2-tight-caps": lambda: _gemma2(
        attn_logit_softcapping=2.0, final_logit_softcapping=1.5, num_key_value_heads=4
    ),
    "gemma2-plain": lambda: _gemma2(
        attn_logit_softcapping=None, final_logit_softcapping=None, query_pre_attn_scalar=32
    ),
    "olmo3": lambda: _olmo3(),
    "olmo3-yarn-tied": lambda: _olmo3(
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        num_key_value_heads=4,
        tie_word_embeddings=True,
    ),
    "olmo3-biases": lambda: _olmo3(
        attention_bias=True, sliding_window=30, num_hidden_layers=5, layer_types=None
    ),
    "gpt-oss": _gpt_oss,
    "gpt-oss-clamped": lambda: _gpt_oss(
        swiglu_limit=0.5,
        num_hidden_layers=3,
        layer_types=None,
        rope_parameters=YARN | {"truncate": False, "beta_fast": 16},
    ),
    "gpt-oss-odd": lambda: _gpt_oss(  # sizes that 2 and 4 ranks do not divide
        intermediate_size=39, num_key_value_heads=1, num_experts_per_tok=4, sliding_window=30
    ),
    # Experts of whole blocks of 32 weights, for MXFP4.
    "gpt-oss-32": lambda: _gpt_oss(intermediate_size=32),
    "gpt-oss-288": lambda: _gpt_oss(intermediate_size=288),
    "exaone4-wide": lambda: _exaone4(head_dim=32, num_key_value_heads=1),
}
