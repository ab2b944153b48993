"""Checkpoints of Qwen3 with the demo model's tokenizer: random, and one that recites."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from minisgl.demo import model_path

__all__ = ["build_reciting_model", "build_seeing_model", "build_tiny_model"]


def build_tiny_model(folder: Path) -> Path:
    """Write config, float32 weights and tokenizer into `folder`: real text, meaningless answers."""
    tokenizer = json.loads((model_path() / "tokenizer.json").read_text())
    size = max(_ids(tokenizer).values())
    torch.manual_seed(0)
    _write(folder, _model(size + 1, eos_token_id=size))
    shutil.copy(model_path() / "tokenizer.json", folder)
    return folder


def build_reciting_model(folder: Path, recital: list[str], new_tokens: list[str]) -> Path:
    """As build_tiny_model, but the model follows each token of `recital` with the next one.

    No token occurs twice in `recital`.

    The embeddings of the recital's tokens are orthogonal. The layers do not change them. The row of
    a token in the output head is the embedding of the token before it in the recital. new_tokens:
    tokens of the model that the tokenizer gets if it does not have them.
    """
    tokenizer = json.loads((model_path() / "tokenizer.json").read_text())
    for content in [token for token in new_tokens if token not in _ids(tokenizer)]:
        added = {**tokenizer["added_tokens"][0], "content": content, "special": False}
        tokenizer["added_tokens"].append({**added, "id": max(_ids(tokenizer).values()) + 1})
    ids = [_ids(tokenizer)[token] for token in recital]
    model = _model(max(_ids(tokenizer).values()) + 1, eos_token_id=ids[-1])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        for place, (token, following) in enumerate(pairwise(ids)):
            model.model.embed_tokens.weight[token, place] = 1
            model.lm_head.weight[following, place] = 5
    _write(folder, model)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def build_seeing_model(folder: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model with the config, the tokens and the template of one with images.

    It has no image encoder. The stub of the scheduler needs none.
    """
    shutil.copytree(tiny_model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for content in ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>"):
        added = {**tokenizer["added_tokens"][0], "content": content, "special": True}
        tokenizer["added_tokens"].append({**added, "id": max(_ids(tokenizer).values()) + 1})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}"
        "{% else %}{% for p in m.content %}{{ '<|vision_start|><|image_pad|><|vision_end|>' "
        "if p.type == 'image' else p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["Qwen3_5ForConditionalGeneration"]
    config["image_token_id"] = _ids(tokenizer)["<|image_pad|>"]
    config["vision_config"] = {"patch_size": 16, "spatial_merge_size": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return {**tokenizer["model"]["vocab"], **added}


def _model(vocab_size: int, eos_token_id: int) -> transformers.Qwen3ForCausalLM:
    config = transformers.Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3ForCausalLM(config)


def _write(folder: Path, model: transformers.Qwen3ForCausalLM) -> None:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    shutil.copy(model_path() / "tokenizer_config.json", folder)
