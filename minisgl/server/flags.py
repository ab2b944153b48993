"""The flags of the command line as data; `args` makes a parser of them."""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

from minisgl.server.config import Limits

__all__ = ["FLAGS", "Flag"]


class Flag(NamedTuple):
    """kind: a parser of the text, the allowed words, or None for a switch. unit: shown in help."""

    names: str
    help: str
    kind: Callable[[str], Any] | tuple[str, ...] | None = None
    default: Any = None
    unit: str | None = None
    many: bool = False


def bounded(
    kind: type[int] | type[float], low: float, high: float | None = None
) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= (high if high is not None else float("inf")):
            what = "an integer" if kind is int else "a number"
            upper = "" if high is None else f" and at most {high:g}"
            raise argparse.ArgumentTypeError(f"must be {what} of at least {low:g}{upper}")
        return value

    return parse


def power_of_two(text: str) -> int:
    if not text.isdigit() or int(text) < 1 or int(text) & (int(text) - 1):
        raise argparse.ArgumentTypeError("must be a power of two")
    return int(text)


_LIMITS = Limits()
_COUNT = bounded(int, 1)
_SECONDS = bounded(float, 0)

# Names that mini-sglang has too mean the same here.
FLAGS: dict[str, tuple[Flag, ...]] = {
    "model": (
        Flag(
            "--model --model-path",
            "Hugging Face id or local folder; none: the embedded demo model",
            str,
            unit="ID_OR_FOLDER",
        ),
        Flag("--revision", "branch, tag or commit on the Hugging Face hub", str, unit="NAME"),
        Flag(
            "--served-model-name",
            "names that requests may use; none: the id or the folder's name",
            str,
            unit="NAME",
            many=True,
        ),
        Flag(
            "--dtype",
            "auto: the checkpoint's on a GPU, float32 on CPU",
            ("auto", "float16", "bfloat16", "float32"),
            "auto",
        ),
        Flag("--device", "where the model runs", ("auto", "cpu", "cuda"), "auto"),
        Flag(
            "--tensor-parallel-size --tp-size --tp",
            "processes that share the model, one per GPU",
            bounded(int, 1, 64),
            1,
            "N",
        ),
        Flag("--dummy-weight", "random weights; only the model's config is read"),
        Flag("--ignore-generation-config", "sampling defaults are OpenAI's, not the model's own"),
    ),
    "memory and kernels": (
        Flag(
            "--memory-ratio",
            "share of the device's free memory to use, 0 to 1",
            bounded(float, 0.01, 1),
            0.9,
            "SHARE",
        ),
        Flag("--num-pages", "KV pages; none: sized from memory", bounded(int, 2), unit="N"),
        Flag("--page-size", "tokens per KV page, a power of two", power_of_two, 16, "TOKENS"),
        Flag(
            "--max-seq-len-override",
            "context length; none: the model's",
            bounded(int, 2),
            unit="TOKENS",
        ),
        Flag(
            "--attention-backend --attn", "auto, one name, or PREFILL,DECODE", str, "auto", "NAME"
        ),
        Flag("--moe-backend", "auto, or one name", str, "auto", "NAME"),
        Flag(
            "--cuda-graph-max-bs --graph",
            "largest captured decode batch; 0: no CUDA graphs; none: up to 256",
            bounded(int, 0),
            unit="N",
        ),
    ),
    "scheduling": (
        Flag(
            "--max-running-requests",
            "requests that decode together",
            bounded(int, 1, 65536),
            256,
            "N",
        ),
        Flag(
            "--max-prefill-length --max-extend-length",
            "prompt tokens per step at most",
            _COUNT,
            8192,
            "TOKENS",
        ),
        Flag(
            "--target-step-ms",
            "while streams decode, prefill is cut to keep a step below this; 0: no target",
            _SECONDS,
            20.0,
            "MS",
        ),
        Flag("--cache-type --cache", "prefix cache", ("radix", "naive"), "radix"),
        Flag(
            "--step-timeout",
            "work pending and no step for so long is a hang and ends the service; 0: never",
            _SECONDS,
            60.0,
            "SECONDS",
        ),
    ),
    "serving": (
        Flag("--host", "address to listen on", str, "127.0.0.1", "ADDRESS"),
        Flag("--port", "0: a free one", bounded(int, 0, 65535), 1919, "N"),
        Flag(
            "--num-tokenizer --tokenizer-count", "tokenizer processes", bounded(int, 1, 64), 1, "N"
        ),
        Flag(
            "--drain-grace",
            "after SIGTERM, new requests are still accepted for so long",
            _SECONDS,
            5.0,
            "SECONDS",
        ),
        Flag(
            "--drain-timeout",
            "after SIGTERM, running requests are ended after so long",
            _SECONDS,
            60.0,
            "SECONDS",
        ),
        Flag("--shell --shell-mode", "chat in this terminal; the server ends with the shell"),
        Flag(
            "--log-level", "none: info, in the shell warning", ("debug", "info", "warning", "error")
        ),
    ),
    "limits": (
        Flag(
            "--max-queued-requests",
            "answers without a first token; more are refused with 503",
            _COUNT,
            _LIMITS.max_queued_reqs,
            "N",
        ),
        Flag(
            "--max-body-bytes",
            "size of one HTTP body; larger ones are refused with 413",
            bounded(int, 1024),
            _LIMITS.max_body_bytes,
            "BYTES",
        ),
        Flag(
            "--max-prompt-chars",
            "of one prompt, before tokenizing; none: 32 per token of context",
            _COUNT,
            unit="CHARS",
        ),
        Flag("--allow-unknown-params", "ignore request parameters that minisgl does not know"),
    ),
}
