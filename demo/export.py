"""Write the trained network as a model folder that transformers and minisgl load."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import tokenizers
import torch
import transformers
from safetensors.torch import save_file

from demo.network import Network, Shape
from demo.vocabulary import END_OF_TEXT, TURN_END, load_tokenizer


def train_facts(
    arguments: argparse.Namespace, steps: int, tokens: int, wall_s: float, device: torch.device
) -> dict[str, object]:
    """Return the facts about the training that the model card shows."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return {
        "seed": arguments.seed,
        "steps": steps,
        "planned_steps": arguments.steps,
        "tokens": tokens,
        "short_tokens_per_step": arguments.short_tokens,
        "long_tokens_per_step": arguments.long_tokens,
        "peak_learning_rate": arguments.peak,
        "wall_s": round(wall_s, 1),
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenizers": tokenizers.__version__,
        "transformers": transformers.__version__,
    }


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_config(folder: Path, shape: Shape) -> None:
    """Write config.json and generation_config.json."""
    tokenizer = load_tokenizer()
    end_ids = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    _write_json(folder / "config.json", shape.config(end_ids, pad_id=end_ids[1]))
    _write_json(
        folder / "generation_config.json",
        {"do_sample": False, "eos_token_id": end_ids, "pad_token_id": end_ids[1]},
    )


@torch.no_grad()
def round_to_bf16(network: Network) -> None:
    """Give every parameter the value that it has in the exported file."""
    for parameter in network.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))


def export(network: Network, folder: Path, facts: dict[str, object]) -> None:
    """Write bf16 weights, both configurations and report.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        # Compiling a layer changes neither its parameters nor their names.
        name: tensor.detach().to(torch.bfloat16).contiguous().cpu()
        for name, tensor in network.state_dict().items()
    }
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, network.shape)
    _write_json(folder / "report.json", facts)
    print(json.dumps(facts))
