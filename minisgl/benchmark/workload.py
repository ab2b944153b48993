"""Workloads: random prompts and output lengths, fixed by a seed."""

import argparse
import random

import numpy as np

from minisgl.benchmark.flag_types import flags, nonnegative_int, positive_int
from minisgl.benchmark.trace import Load
from minisgl.core import ConfigError

LARGEST_ID = 10_000


def make_workload(
    count: int = 256,
    prompt_tokens: tuple[int, int] = (100, 1024),
    output_tokens: tuple[int, int] = (100, 1024),
    shared_prefix_tokens: int = 0,
    seed: int = 0,
    largest_id: int = LARGEST_ID,
) -> Load:
    """Return `count` prompts of random ids in 0..largest_id, with random output lengths.

    prompt_tokens, output_tokens: smallest and largest length; lengths are uniform in that range.
    shared_prefix_tokens: length of a prefix that is added to every prompt.
    The defaults are the workload in the README files of nano-vllm and mini-sglang: 142,827 prompt
    and 133,966 output tokens.
    """
    source = random.Random(seed)
    prompts = [
        [source.randint(0, largest_id) for _ in range(source.randint(*prompt_tokens))]
        for _ in range(count)
    ]
    max_tokens = [source.randint(*output_tokens) for _ in range(count)]
    prefix = [source.randint(0, largest_id) for _ in range(shared_prefix_tokens)]
    return Load([np.array(prefix + prompt, dtype=np.int32) for prompt in prompts], max_tokens)


def add_workload_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that workload_from reads."""
    add = flags(parser, "workload")
    add("--requests", positive_int, 256, "number of prompts")
    ends = {"nargs": 2, "metavar": ("MIN", "MAX")}
    for kind in ("prompt", "output"):
        add(f"--{kind}-tokens", int, (100, 1024), f"range of {kind} lengths, uniform", **ends)
    add("--shared-prefix", nonnegative_int, 0, "length of a prefix of all prompts")
    add("--seed", int, 0, "seed of lengths and token ids")
    add("--largest-id", nonnegative_int, LARGEST_ID, "largest id in prompts")


def check_workload(options: argparse.Namespace) -> None:
    """Raise ConfigError when a range of lengths is empty."""
    for kind in ("prompt", "output"):
        smallest, largest = getattr(options, f"{kind}_tokens")
        if not 1 <= smallest <= largest:
            raise ConfigError(f"--{kind}-tokens takes two numbers with 1 <= MIN <= MAX")


def workload_from(options: argparse.Namespace, vocab_size: int | None = None) -> Load:
    """Return the workload that the flags describe. Raises ConfigError.

    vocab_size: all ids are below it.
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
