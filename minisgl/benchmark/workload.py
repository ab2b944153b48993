"""A fixed set of prompts and output lengths."""

import argparse
import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.flags import natural, whole
from minisgl.core import ConfigError

LARGEST_ID = 10_000


@dataclass(frozen=True, slots=True)
class Workload:
    """prompts: token ids; max_tokens: how many tokens each generates, no more and no less."""

    prompts: list[list[int]]
    max_tokens: list[int]

    def prompt_lengths(self) -> NDArray[np.int64]:
        return np.array([len(prompt) for prompt in self.prompts], dtype=np.int64)

    def output_lengths(self) -> NDArray[np.int64]:
        return np.array(self.max_tokens, dtype=np.int64)


def make_workload(
    count: int = 256,
    prompt_tokens: tuple[int, int] = (100, 1024),
    output_tokens: tuple[int, int] = (100, 1024),
    shared_prefix_tokens: int = 0,
    seed: int = 0,
    largest_id: int = LARGEST_ID,
) -> Workload:
    """Lengths uniform in the ranges, both ends included.

    The defaults are the workload in the README files of nano-vllm and mini-sglang: 142,827 prompt
    and 133,966 output tokens. shared_prefix_tokens more ids begin every prompt.
    """
    source = random.Random(seed)
    prompts = [
        [source.randint(0, largest_id) for _ in range(source.randint(*prompt_tokens))]
        for _ in range(count)
    ]
    max_tokens = [source.randint(*output_tokens) for _ in range(count)]
    prefix = [source.randint(0, largest_id) for _ in range(shared_prefix_tokens)]
    return Workload([prefix + prompt for prompt in prompts], max_tokens)


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that workload_from reads."""
    group = parser.add_argument_group("workload")
    group.add_argument("--requests", type=whole, default=256, help="number of prompts (256)")
    for what in ("prompt", "output"):
        group.add_argument(
            f"--{what}-tokens",
            type=int,
            nargs=2,
            default=(100, 1024),
            metavar=("MIN", "MAX"),
            help=f"{what} lengths, uniform (100 1024)",
        )
    group.add_argument(
        "--shared-prefix", type=natural, default=0, help="tokens all prompts begin with"
    )
    group.add_argument("--seed", type=int, default=0, help="of lengths and token ids (0)")
    group.add_argument(
        "--largest-id", type=natural, default=LARGEST_ID, help=f"of prompt tokens ({LARGEST_ID})"
    )


def check_workload(options: argparse.Namespace) -> None:
    """Raises ConfigError where the flags describe no workload."""
    for what in ("prompt", "output"):
        least, most = getattr(options, f"{what}_tokens")
        if not 1 <= least <= most:
            raise ConfigError(f"--{what}-tokens takes a positive MIN and a MAX not below it")


def workload_from(options: argparse.Namespace, vocab_size: int | None = None) -> Workload:
    """The workload that the flags describe; vocab_size: its ids are below that.

    Raises ConfigError.
    """
    check_workload(options)
    largest = options.largest_id
    return make_workload(
        options.requests,
        tuple(options.prompt_tokens),
        tuple(options.output_tokens),
        options.shared_prefix,
        options.seed,
        largest if vocab_size is None else min(largest, vocab_size - 1),
    )
