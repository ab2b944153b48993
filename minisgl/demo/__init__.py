"""The paths of the embedded demo model.

`minisgl` without `--model` serves this model. Its training code is in `demo/` at the top of the
repository. MODEL_CARD.md beside this file describes its tasks and its accuracy.
"""

from pathlib import Path

__all__ = ["evaluation_path", "model_path"]


def model_path() -> Path:
    """Return the folder with the configuration, the weights and the tokenizer."""
    return Path(__file__).resolve().parent


def evaluation_path() -> Path:
    """Return the file of held-out prompts with their right answers, one JSON object a line."""
    return model_path() / "evaluation.jsonl"
