"""Tiny random float32 models with an image encoder, and their inputs for transformers."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.parity.hybrid_models import BASE, EXPERTS, Heads
from tests.parity.image_logits import Prompt

PATCH, MERGE = 16, 2
MEAN, STD = [0.5, 0.4, 0.6], [0.5, 0.3, 0.4]  # of each channel
IMAGE, VIDEO = 140, 141  # token ids
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 49,
    "initializer_range": 0.2,
}
_OUTER = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": 142,
    "vision_end_token_id": 143,
}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_interleaved": True}


def _qwen3_5(outer: Any, **changes: Any) -> Any:
    # 16 of the 32 elements of a head rotate: 8 frequencies, of which 2 follow the column.
    rope = _SECTIONS | {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
    text = BASE | {"rope_parameters": rope} | changes
    return outer(text_config=text, vision_config=_VISION | {"out_hidden_size": 64}, **_OUTER)


def _qwen3_vl() -> Any:
    text = {key: size for key, size in BASE.items() if not key.startswith("linear")}
    text |= {"rope_parameters": _SECTIONS | {"mrope_section": [6, 5, 5]}}
    vision = _VISION | {"out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]}
    return transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_OUTER)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: _qwen3_5(transformers.Qwen3_5Config),
    "qwen3_5_moe": lambda: _qwen3_5(transformers.Qwen3_5MoeConfig, **EXPERTS),
    "qwen3-vl": _qwen3_vl,
}


def random_model(config: Any, fill: Callable[[str, Tensor], None]) -> Any:
    """Return a random model. fill: gives values to a parameter with this name, in place."""
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model


def save(name: str, folder: Path) -> tuple[Any, str]:
    """Save a random model whose norms and biases have no default values."""

    def fill(tensor: str, parameter: Tensor) -> None:
        if tensor.endswith(("norm.weight", "norm1.weight", "norm2.weight", ".bias", "A_log")):
            around_one = "norm" in tensor and tensor.endswith("weight")
            offset = name != "qwen3-vl" and "visual" not in tensor and "linear" not in tensor
            parameter.normal_(1.0 if around_one and not offset else 0.0, 0.3)

    model, path = random_model(MODELS[name](), fill), str(folder / name)
    model.save_pretrained(path)
    settings = {"image_mean": MEAN, "image_std": STD}
    (folder / name / "preprocessor_config.json").write_text(json.dumps(settings))
    return model, path


def add_draft_head(model: Any, path: str) -> None:
    """Add a head to a model that `save` saved. Most of its drafts are right (Heads.agrees)."""
    text = transformers.AutoModelForCausalLM.from_config(
        model.config.text_config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    text.model.load_state_dict(model.model.language_model.state_dict())
    text.lm_head.load_state_dict(model.lm_head.state_dict())
    text.save_pretrained(f"{path}-text")
    Heads(text, f"{path}-text", agrees=True)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.save_pretrained(path)
    stored = load_file(f"{path}-text/model.safetensors")
    head = {name: tensor for name, tensor in stored.items() if name.startswith("mtp.")}
    save_file(load_file(f"{path}/model.safetensors") | head, f"{path}/model.safetensors")
    file = Path(path) / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    file.write_text(json.dumps(config))


def picture(rows: int, cols: int, seed: int = 0) -> Tensor:
    """Return random pixels of rows * cols patches, uint8 [rows * PATCH, cols * PATCH, 3]."""
    values = np.random.default_rng(seed).integers(0, 256, (rows * PATCH, cols * PATCH, 3))
    return torch.from_numpy(values.astype(np.uint8))


def processed(pictures: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return pixel_values and image_grid_thw as transformers computes them from pictures."""
    processor = transformers.Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        temporal_patch_size=2,
        merge_size=MERGE,
        image_mean=MEAN,
        image_std=STD,
        do_resize=False,
    )
    found = processor([one.numpy() for one in pictures], return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "image_grid_thw")}


# The prompt: text tokens, and grids of images in patches.
_PARTS: list[list[int] | tuple[int, int]] = [
    [5, 9, 2],
    (4, 6),
    [7, 8],
    (6, 4),
    [11],
    (2, 2),
    [3] * 9,
]


@torch.inference_mode()
def prompt_of(model: Any) -> Prompt:
    """Return a prompt of 34 tokens with three images."""
    plain, kinds, ids, pictures = list[int](), list[int](), list[int](), list[Tensor]()
    for part in _PARTS:
        is_image = isinstance(part, tuple)
        added = [IMAGE] * (part[0] * part[1] // MERGE**2) if is_image else list(part)
        first = sum(id_ < 0 for id_ in ids)
        ids += [~(first + nth) for nth in range(len(added))] if is_image else added
        if is_image:
            pictures.append(picture(part[0], part[1], seed=len(pictures)))
        plain += added
        kinds += [int(is_image)] * len(added)
    given = processed(pictures)
    inputs = {"input_ids": torch.tensor([plain]), "mm_token_type_ids": torch.tensor([kinds])}
    grids = given["image_grid_thw"]
    positions, delta = model.model.get_rope_index(**inputs, image_grid_thw=grids)
    logits = model(**inputs, **given).logits[0]
    return Prompt(ids, pictures, positions[:, 0].int(), int(delta), logits)
