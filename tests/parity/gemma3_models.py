"""Tiny random float32 models of Gemma 3 with images, and transformers' results for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.configs import BASE
from tests.parity.image_models import random_model

PATCH, SIDE = 4, 8  # pixels of a patch; rows and columns of patches of an image
IMAGE, BEGIN, END = 140, 141, 142  # token ids
_TEXT = BASE | {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}

_LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}


def _config(text: dict[str, Any], tokens: int, **vision: Any) -> Any:
    encoder = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    encoder |= {"num_attention_heads": 2, "image_size": PATCH * SIDE, "patch_size": PATCH}
    return transformers.Gemma3Config(
        text_config=_TEXT | text,
        vision_config=encoder | {"vision_use_head": False} | vision,
        mm_tokens_per_image=tokens,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )


# Windows that are longer and shorter than an image of 16 tokens; images of 16 and of 4 tokens.
MODELS = {
    "window-20": lambda: _config({"sliding_window": 20}, 16),
    "window-9": lambda: _config({"sliding_window": 9, "num_key_value_heads": 1}, 16),
    "pooled": lambda: _config(
        {"sliding_window": 30, "rope_parameters": _LINEAR},
        4,
        num_hidden_layers=3,
        num_attention_heads=4,
        vision_use_head=True,
    ),
}


def save(name: str, folder: Path) -> tuple[Any, str]:
    """Save a random model whose norms and biases have no default values."""

    def fill(tensor: str, parameter: Tensor) -> None:
        if tensor.endswith("bias") or "norm" in tensor:
            is_layer_norm = "vision_tower" in tensor and tensor.endswith("weight")
            parameter.normal_(float(is_layer_norm), 0.3)
        elif "vision_tower" in tensor or "projection" in tensor:
            parameter.normal_(0.0, 0.2)

    model, path = random_model(MODELS[name](), fill), str(folder / name)
    model.save_pretrained(path)
    file = folder / name / "model.safetensors"
    tensors = load_file(file)
    save_file(
        {_spelled(key, name): value for key, value in tensors.items()}, file, {"format": "pt"}
    )
    return model, path


def _spelled(tensor: str, name: str) -> str:
    """Return the name of a tensor as published checkpoints or as transformers 5 have it."""
    if name == "window-9":
        return tensor.replace("vision_tower.", "vision_tower.vision_model.")
    if name == "pooled":
        return "model." + tensor.replace("language_model.model.", "language_model.")
    return tensor


def tokens_of(model: Any) -> int:
    """The tokens of an image."""
    return int(model.config.mm_tokens_per_image)


def picture(seed: int) -> Tensor:
    """Return random pixels, uint8 [PATCH * SIDE, PATCH * SIDE, 3].

    Those of an odd seed differ from those of the seed before in one pixel.
    """
    shape = PATCH * SIDE, PATCH * SIDE, 3
    pixels = np.random.default_rng(seed // 2).integers(0, 256, shape, dtype=np.uint8)
    pixels[0, 0, 0] ^= seed % 2
    return torch.from_numpy(pixels)


def values_of(pixels: Tensor) -> Tensor:
    """Return the pixel_values of transformers' processor, [1, 3, height, width]."""
    processor = transformers.Gemma3ImageProcessorPil(do_resize=False, do_pan_and_scan=False)
    found: Tensor = processor([pixels.numpy()], return_tensors="pt")["pixel_values"]
    return found


@torch.inference_mode()
def logits_of(model: Any, ids: list[int], seeds: list[int]) -> Tensor:
    """Return transformers' logits, [n, V]. ids: with IMAGE for each token of an image."""
    tokens = torch.tensor([ids])
    given: dict[str, Any] = {"token_type_ids": (tokens == IMAGE).int()}
    if seeds:
        given["pixel_values"] = torch.cat([values_of(picture(seed)) for seed in seeds])
    logits: Tensor = model(input_ids=tokens, **given).logits[0]
    return logits
