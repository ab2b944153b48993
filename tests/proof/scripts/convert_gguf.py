"""Converts a GGUF file into a model folder: `convert_gguf.py FILE.gguf FOLDER`.

It needs the packages gguf and accelerate. transformers' save_pretrained refuses a model that was
read from GGUF, so this writes the float32 weights itself.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def convert(source: Path, folder: Path) -> None:
    """Write config.json last, so that a folder with this file is complete."""
    names = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**names).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**names, dtype=torch.float32)
    model.generation_config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
