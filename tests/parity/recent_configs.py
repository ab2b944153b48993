"""Tiny configurations of the families of 2026."""

from collections.abc import Callable
from typing import Any

import transformers

from tests.parity.configs import BASE, EXPERTS, YARN

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


RECENT_CONFIGS: dict[str, Callable[[], Any]] = {
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
