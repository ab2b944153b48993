"""Tiny random float32 models with gated delta nets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

BASE: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}


def dense(**changes: Any) -> Any:
    return transformers.Qwen3_5TextConfig(**BASE | changes)


def _sparse(**changes: Any) -> Any:
    sizes = {name: size for name, size in BASE.items() if name != "intermediate_size"}
    return transformers.Qwen3_5MoeTextConfig(**sizes | EXPERTS | changes)


def _next(**changes: Any) -> Any:
    return transformers.Qwen3NextConfig(**BASE | EXPERTS | changes)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_5": dense,
    "qwen3_5-equal-heads": lambda: dense(linear_num_value_heads=4, tie_word_embeddings=True),
    "qwen3_5-ends-with-delta": lambda: dense(
        layer_types=["full_attention", "linear_attention"] * 2, linear_num_key_heads=1
    ),
    "qwen3_5_moe": _sparse,
    "qwen3_next": _next,
    "qwen3_next-dense-layer": lambda: _next(
        mlp_only_layers=[1], norm_topk_prob=False, shared_expert_intermediate_size=80
    ),
}


def save(name: str, folder: Path) -> tuple[Any, str]:
    """Save a random model whose decays, norms and convolutions have no default values."""
    torch.manual_seed(0)
    config, path = MODELS[name](), str(folder / name)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            if tensor.endswith(("norm.weight", "dt_bias", "A_log", "conv1d.weight")):
                parameter.normal_(1.0 if "linear_attn.norm" in tensor else 0.0, 0.3)
    model.save_pretrained(path)
    return model, path
