"""Tiny random float32 models of every family, and the tokens that transformers generates.

With kv="fp8" the attention of transformers rounds every key and value to FP8 and back.
"""

import fcntl
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.configs import CONFIGS, VOCAB_SIZE
from tests.parity.recent_configs import RECENT_CONFIGS

__all__ = [
    "FAMILIES",
    "VOCAB_SIZE",
    "build_model",
    "greedy_tokens",
    "save_config",
    "transformers_greedy",
    "transformers_logits",
]

# A variable of tests/conftest.py. The server warns of unknown names that begin with MINISGL_.
MODELS = "TEST_MODELS_FOLDER"
FAMILIES = CONFIGS | RECENT_CONFIGS


def _auto_class(config: Any) -> Any:
    """Return the class of transformers that loads a model of this config."""
    has_encoder = hasattr(config, "vision_config")
    return (
        transformers.AutoModelForImageTextToText
        if has_encoder
        else transformers.AutoModelForCausalLM
    )


def save_config(config: Any, folder: Path) -> str:
    """Save a checkpoint without tensors, for random weights, and return its path."""
    config.architectures = [_auto_class(config)._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    save_file({}, folder / "model.safetensors")
    return str(folder)


def build_model(family: str, folder: Path, seed: int = 0) -> str:
    """Save a random model of `family` in a subfolder of `folder`, and return its path.

    The workers of a run build each model once, in the folder of the variable MODELS, and copy it.
    """
    path = folder / family
    if path.exists():
        return str(path)
    if MODELS not in os.environ:
        _build(family, path, seed)
        return str(path)
    built = Path(os.environ[MODELS]) / f"{family}-{seed}"
    # The name of a family may have a dot, where with_suffix would cut it.
    with built.with_name(f"{built.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            unfinished = built.with_name(f"{built.name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)  # left by a worker that was killed
            _build(family, unfinished, seed)
            unfinished.rename(built)
    shutil.copytree(built, path)
    return str(path)


def _build(family: str, path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config = FAMILIES[family]()
    model = _auto_class(config).from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"norm(_\d)?\.weight$|bias$|\.sinks$|scale$", name):
                offset = family.startswith(("gemma2", "gemma3"))
                around_one = ("norm" in name and not offset) or "scale" in name
                parameter.normal_(1.0 if around_one else 0.0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.5)
            elif name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
    model.save_pretrained(path)
    if family.startswith("qwen3-vl-moe"):
        _transpose_experts(path / "model.safetensors")


def _transpose_experts(file: Path) -> None:
    """Store the matrices of fused experts as published checkpoints of Qwen3-VL-MoE do."""
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Round each vector [..., D] to e4m3, with a power of two as its scale, and back."""
    amax = x.abs().amax(-1, keepdim=True).double().clamp(min=1e-15)
    scale = torch.exp2(torch.ceil(torch.log2(amax / 448))).float()
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def _fp8_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Any:
    rounded = rounded_to_fp8(key), rounded_to_fp8(value)
    # The family's own function, which knows its sinks and soft caps.
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, *rounded, *args, **kwargs)


@cache
def _reference(path: str) -> Any:
    model = _auto_class(transformers.AutoConfig.from_pretrained(path)).from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval()


def _register_fp8_attention() -> str:
    """Return the name of the attention that rounds keys and values to FP8."""
    # These imports take 4 s, which the ranks and many tests do not need.
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("fp8_kv", _fp8_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register("fp8_kv", eager_mask)
    return "fp8_kv"


@torch.inference_mode()
def transformers_logits(path: str, ids: list[int], kv: str = "auto") -> torch.Tensor:
    """float32 [len(ids), V] of one prompt, by transformers' eager attention."""
    model = _reference(path)
    # One model serves both caches: its load takes longer than most of the tests that need it.
    if kv == "fp8":
        model.set_attn_implementation(_register_fp8_attention())
    try:
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    finally:
        if kv == "fp8":
            model.set_attn_implementation("eager")
    return logits


def transformers_greedy(
    path: str, prompt_ids: list[int], n: int, kv: str = "auto", guess: Sequence[int] = ()
) -> list[int]:
    """The n tokens of greedy decoding after the prompt. It uses no KV cache and ignores EOS.

    guess: tokens that the result may begin with. One pass of the model checks all of them.
    """
    known = _known_tokens(path, kv, tuple(prompt_ids))
    return greedy_tokens(
        lambda ids: transformers_logits(path, ids, kv), prompt_ids, n, known, guess
    )


def greedy_tokens(
    logits_of: Callable[[list[int]], Tensor],
    prompt_ids: list[int],
    n: int,
    known: list[int],
    guess: Sequence[int] = (),
) -> list[int]:
    """Return the n tokens of greedy decoding after the prompt.

    logits_of: gives the logits of all ids, float32 [len(ids), V]. known: the first of the tokens;
    the function adds those that it computes. guess: as in transformers_greedy.
    """
    while len(known) < n:
        drafts = list(guess[len(known) : n - 1])
        logits = logits_of([*prompt_ids, *known, *drafts])
        tokens = logits[len(prompt_ids) + len(known) - 1 :].argmax(-1).tolist()
        for token, draft in zip(tokens, [*drafts, None], strict=True):
            known.append(token)
            if token != draft:
                break  # the tokens after it follow a wrong draft
    return known[:n]


@cache
def _known_tokens(path: str, kv: str, prompt_ids: tuple[int, ...]) -> list[int]:
    """The tokens after a prompt that earlier calls have computed; a call adds further ones."""
    return []
