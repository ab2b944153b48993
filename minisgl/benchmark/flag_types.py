"""Adds the flags of the benchmarks. Their types reject a wrong value before the benchmark starts.

add = flags(parser, "workload")
add("--requests", positive_int, 256, "number of prompts")  # its help: number of prompts (256)
"""

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minisgl.benchmark.models import SHAPES

MOST_PINNED = 3  # with more drafts, the accepted length of real text varies too much to be pinned


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, int(text))


def nonnegative_int(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, int(text))


def nonnegative_float(text: str) -> float:
    """A finite number of at least 0."""
    value = float(text)
    if not 0 <= value < math.inf:  # NaN fails this comparison too
        raise argparse.ArgumentTypeError("must be a number of at least 0")
    return value


def positive_float(text: str) -> float:
    """A number above 0, or inf."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def output_file(text: str) -> Path:
    """The path of a writable file. The check runs before the measurement, which may take long."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def _at_least(minimum: int, value: int) -> int:
    if value < minimum:
        raise argparse.ArgumentTypeError(f"must be at least {minimum}")
    return value


def flags(parser: argparse.ArgumentParser, title: str = "") -> Callable[..., None]:
    """Return a function that adds flags to a new group with this title; "": to no group.

    The function takes the name, the type and the default of a flag, its help text, and further
    options of add_argument. It adds the default to the help text, unless that is None or [].
    """
    group = parser.add_argument_group(title) if title else parser

    def add(name: str, kind: Callable[[str], Any], default: Any, text: str, **options: Any) -> None:
        shown = "" if default in (None, []) else f" ({_shown(default)})"
        group.add_argument(name, type=kind, default=default, help=text + shown, **options)

    return add


def _shown(default: Any) -> str:
    if isinstance(default, tuple):
        return " ".join(map(_shown, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


_ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "--device": {"default": "auto", "choices": ("auto", "cpu", "cuda"), "help": "(auto)"},
    "--tp": {"type": positive_int, "default": 1, "help": "tensor-parallel GPUs (1)"},
    "--page-size": {"type": positive_int, "default": 16, "help": "tokens per KV page (16)"},
    "--quantization": {"choices": ("fp8", "int4"), "help": "convert the weights at load (none)"},
    "--kv-cache-dtype": {"default": "auto", "choices": ("auto", "bf16", "fp8"), "help": "(auto)"},
}


def add_model_flags(parser: argparse.ArgumentParser, default: str, *further: str) -> None:
    """Add --model, and the flags `further`, which are those of the server."""
    group = parser.add_argument_group("engine, as in the server")
    known = f"{', '.join(SHAPES)} (random weights), or a model folder ({default})"
    group.add_argument("--model", default=default, help=known)
    for flag in further:
        group.add_argument(flag, **_ENGINE_FLAGS[flag])


def pinned_lengths(text: str) -> dict[int, float]:
    """Read "1:1.93,3:3.39": the tokens of a step with each number of drafts."""
    found = {}
    for pair in text.split(","):
        drafts, _, tokens = pair.partition(":")
        try:
            found[int(drafts)] = float(tokens)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{pair!r} is not DRAFTS:TOKENS") from None
    for count, mean in found.items():
        if count not in (1, MOST_PINNED) or not 1 <= mean <= count + 1:
            raise argparse.ArgumentTypeError(
                f"{count}:{mean} must have 1 or {MOST_PINNED} drafts, and 1 to drafts + 1 tokens"
            )
    return found
