"""A random two-layer Qwen3 with the demo model's tokenizer: real text, meaningless answers."""

import json
import shutil
from pathlib import Path

import torch
import transformers

from minisgl.demo import model_path

__all__ = ["build_tiny_model"]


def build_tiny_model(folder: Path) -> Path:
    """Write config, float32 weights and tokenizer into `folder`."""
    tokenizer = json.loads((model_path() / "tokenizer.json").read_text())
    size = max(
        [*tokenizer["model"]["vocab"].values(), *(t["id"] for t in tokenizer["added_tokens"])]
    )
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=size + 1,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=size,
    )
    model = transformers.Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_path() / name, folder / name)
    return folder
