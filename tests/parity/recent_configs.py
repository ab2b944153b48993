"""Tiny configurations of the families of 2026."""

from collections.abc import Callable
from typing import Any

import transformers

from tests.parity.configs import BASE, EXPERTS, VOCAB_SIZE, YARN

_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}


def _qwen3_vl(**kwargs: Any) -> Any:
    rope = {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [4, 6, 6]}
    text = {key: v for key, v in BASE.items() if key != "tie_word_embeddings"}
    text |= {"head_dim": 32, "rope_parameters": rope | {"mrope_interleaved": True}}
    return transformers.Qwen3VLConfig(
        text_config=text | kwargs,
        vision_config=_VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0]},
        tie_word_embeddings=kwargs.get("tie_word_embeddings", False),
    )


def _qwen3_vl_moe(**kwargs: Any) -> Any:
    config = _qwen3_vl()
    text = config.text_config.to_dict() | EXPERTS | {"tie_word_embeddings": False}
    return transformers.Qwen3VLMoeConfig(
        text_config=text | {"model_type": "qwen3_vl_moe_text"} | kwargs,
        vision_config=config.vision_config.to_dict() | {"model_type": "qwen3_vl_moe_vision"},
        tie_word_embeddings=kwargs.get("tie_word_embeddings", False),
    )


def _glm4_moe(**kwargs: Any) -> Any:
    experts = EXPERTS | {"n_routed_experts": 6, "routed_scaling_factor": 1.7}
    sizes = {name: size for name, size in experts.items() if name != "num_experts"}
    return transformers.Glm4MoeConfig(**BASE | {"head_dim": 32} | sizes | kwargs)


def _minimax_m2(**kwargs: Any) -> Any:
    sizes = {"head_dim": 32, "rotary_dim": 16, "intermediate_size": 40}
    experts = {"num_local_experts": 6, "num_experts_per_tok": 2}
    return transformers.MiniMaxM2Config(**BASE | sizes | experts | kwargs)


def _muse_glimmer(**kwargs: Any) -> Any:
    text = {key: v for key, v in BASE.items() if key != "tie_word_embeddings"}
    text |= {"head_dim": 16, "sliding_window": 9, "num_hidden_layers": 5, "pad_token_id": 0}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return transformers.MuseGlimmerConfig(
        text_config=text | kwargs,
        vision_config=vision | {"num_attention_heads": 2},
        out_hidden_size=64,
        projector_hidden_size=16,
        image_token_id=1005,  # transformers replaces these ids, which no prompt has
        video_token_id=1006,
    )


def _gemma4(**kwargs: Any) -> Any:
    sizes = {"head_dim": 16, "global_head_dim": 32, "sliding_window": 9, "pad_token_id": 0}
    sizes |= {"hidden_size_per_layer_input": 0, "num_hidden_layers": 4}
    layers = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
    layers["layer_types"].append("full_attention")
    return transformers.Gemma4TextConfig(**BASE | sizes | layers | kwargs)


def _gemma4_shared(kinds: str, shared: int, **kwargs: Any) -> Any:
    """kinds: the first letters of layer_types. shared: num_kv_shared_layers."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    layers = {"layer_types": [names[kind] for kind in kinds], "num_hidden_layers": len(kinds)}
    inputs = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
    settings = {"num_kv_shared_layers": shared, "tie_word_embeddings": True}
    return _gemma4(**layers | inputs | settings | kwargs)


RECENT_CONFIGS: dict[str, Callable[[], Any]] = {
    "gemma4-keys-as-values": lambda: _gemma4(
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        final_logit_softcapping=3.0,
        num_key_value_heads=4,
        use_bidirectional_attention="vision",
    ),
    "gemma4-shared": lambda: _gemma4_shared("sfsssf", 3, use_double_wide_mlp=True),
    "gemma4-shared-odd": lambda: _gemma4_shared(
        *("sfsf", 2),
        num_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
    "gemma4-shared-experts": lambda: _gemma4_shared(
        *("fssff", 3),
        hidden_size_per_layer_input=11,  # two ranks pad it
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=39,
    ),
    "gemma4-experts": lambda: _gemma4(
        enable_moe_block=True,
        num_experts=6,
        top_k_experts=2,
        moe_intermediate_size=39,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        num_hidden_layers=7,
        layer_types=None,
    ),
    "glm4-moe": _glm4_moe,
    "glm4-moe-norms": lambda: _glm4_moe(
        use_qk_norm=True, num_hidden_layers=3, first_k_dense_replace=2, num_key_value_heads=1
    ),
    "glm4-moe-biases-tied": lambda: _glm4_moe(
        attention_bias=True,
        n_shared_experts=2,
        norm_topk_prob=False,
        moe_intermediate_size=39,
        first_k_dense_replace=0,
        tie_word_embeddings=True,
    ),
    "minimax-m2": _minimax_m2,
    "minimax-m2-whole-heads": lambda: _minimax_m2(rotary_dim=32, num_key_value_heads=4),
    "minimax-m2-odd-tied": lambda: _minimax_m2(
        intermediate_size=39, num_experts_per_tok=3, tie_word_embeddings=True
    ),
    "muse-glimmer": _muse_glimmer,
    "muse-glimmer-listed": lambda: _muse_glimmer(
        num_hidden_layers=2,
        layer_types=["full_attention", "sliding_attention"],
        layer_rope_theta=[5e3, 0],
        num_key_value_heads=1,
        qk_scale_factor=1.3,
    ),
    "muse-glimmer-tight-cap": lambda: _muse_glimmer(
        final_logit_softcapping=1.5, output_multiplier=0.4, num_key_value_heads=4, sliding_window=30
    ),
    "qwen3-vl": _qwen3_vl,
    "qwen3-vl-tied": lambda: _qwen3_vl(tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3-vl-yarn": lambda: _qwen3_vl(
        rope_parameters=YARN | {"mrope_section": [4, 6, 6], "mrope_interleaved": True}
    ),
    "qwen3-vl-moe": _qwen3_vl_moe,
    "qwen3-vl-moe-tied": lambda: _qwen3_vl_moe(tie_word_embeddings=True, num_experts_per_tok=3),
    "qwen3-vl-moe-mixed": lambda: _qwen3_vl_moe(
        num_hidden_layers=3, mlp_only_layers=[1], moe_intermediate_size=39, num_key_value_heads=1
    ),
}
