"""The answers of transformers to the demo model's held-out prompts, kept in a file.

Computing them takes minutes. The file has the hash of everything that decides them, so a test fails
if the model or the prompts change. `python -m tests.evaluation.reference` writes the file.
"""

import hashlib
import json
from pathlib import Path

from demo.evaluate import load_evaluation, transformers_answers
from minisgl.demo import evaluation_path, model_path

_FILE = Path(__file__).with_name("transformers_answers.json")
_INPUTS = ("model.safetensors", "config.json", "generation_config.json", "tokenizer.json")


def inputs_hash() -> str:
    """Return the SHA-256 of the model folder's files and of the prompts."""
    paths = [model_path() / name for name in (*_INPUTS, "tokenizer_config.json")]
    digest = hashlib.sha256()
    for path in (*paths, evaluation_path()):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def kept_answers() -> list[str]:
    """Return the kept answer to each prompt, in the order of `load_evaluation`."""
    kept = json.loads(_FILE.read_text(encoding="utf-8"))
    assert kept["inputs"] == inputs_hash(), (
        "the demo model or its prompts have changed; run python -m tests.evaluation.reference"
    )
    answers: list[str] = kept["answers"]
    return answers


def computed_answers() -> list[str]:
    """Compute the answers with transformers, in float32 on the CPU."""
    return transformers_answers(load_evaluation(), model_path(), "cpu", "float32")


def _main() -> None:
    kept = {"inputs": inputs_hash(), "answers": computed_answers()}
    _FILE.write_text(json.dumps(kept, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    _main()
