"""Checkpoints of models in which a program has replaced layers."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file


def save_with_mixer(
    model: Any, folder: Path, fields: Mapping[str, Any], layers: Iterable[int], name: str
) -> None:
    """Write a checkpoint whose tensors of these layers have the name of their mixer.

    fields: the fields of config.json beside those of model.config.
    """
    (folder / "config.json").write_text(json.dumps(model.config.to_dict() | fields))
    tensors = model.state_dict()
    for layer in layers:
        old, new = (f"model.layers.{layer}.{mixer}." for mixer in ("self_attn", name))
        tensors = {key.replace(old, new): tensor for key, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
