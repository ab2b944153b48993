"""The floor: the shortest possible time of a workload, from bytes, operations and the hardware.

A step takes max(weight bytes / bandwidth, operations / matmul rate) + (KV bytes + bytes of
recurrent states) / bandwidth. The weights of an expert count when at least one token of the step is
routed to it; routing is assumed to be uniform and independent. With several GPUs each holds an
equal part of the model, and the measured time of the all-reduces is added. All prompts are computed
first, in chunks of a fixed number of tokens (the budget). Then all requests decode together; the
batch shrinks as requests end.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.benchmark.flag_types import (
    add_model_flags,
    flags,
    pinned_lengths,
    positive_float,
    positive_int,
)
from minisgl.benchmark.models import SHAPES, write_model
from minisgl.benchmark.trace import Load
from minisgl.benchmark.workload import add_workload_flags, workload_from
from minisgl.cost.floor import (
    Ceilings,
    cost_of,
    operations_of_pairs,
    read_keys,
    reduce_s,
    step_s,
    with_weights,
)
from minisgl.models.build import stored_weights
from minisgl.models.config import load_model_spec
from minisgl.models.spec import ModelSpec
from minisgl.quantization import with_quantizations


class Pinned(NamedTuple):
    """The drafts of each decode step, and the mean number of tokens that a request gets from it."""

    drafts: int
    tokens: float


NO_DRAFTS = Pinned(0, 1.0)


class Floor(NamedTuple):
    """The floor in seconds, and the resulting output tokens per second."""

    prefill_s: float
    decode_s: float
    tokens_per_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def floor_of(
    model: ModelSpec,
    workload: Load,
    ceilings: Ceilings,
    budget_tokens: int = 8192,
    tp: int = 1,
    quantization: str | None = None,
    fp8_kv: bool = False,
    pinned: Pinned = NO_DRAFTS,
) -> Floor:
    """Return the floor of `workload` on tp GPUs, with prompts in chunks of budget_tokens.

    quantization: as in EngineConfig. fp8_kv: the KV cache is FP8. pinned: the drafts of each step,
    for which the model needs its draft head.
    """
    stored = stored_weights(model, quantization, with_quantizations())
    cost = with_weights(cost_of(model, tp, fp8_kv), model, stored, tp)
    prompts, outputs = workload.prompt_lengths, np.array(workload.max_tokens)
    prompt_tokens = int(prompts.sum())
    chunks = -(-prompt_tokens // budget_tokens)
    # The output head is computed for the last token of a prompt only.
    head = 2 * model.hidden_size * model.vocab_size // tp
    prefill_operations: float = (cost.operations - head) * prompt_tokens + head * len(prompts)
    prefill_operations += sum(
        operations * _pairs(prompts, window) / tp
        for window, operations in operations_of_pairs(model).items()
    )
    prefill_s = max(
        chunks * cost.read_bytes(budget_tokens) / ceilings.bytes_per_s,
        ceilings.arithmetic_s(prefill_operations, cost.fp8_operations * prompt_tokens),
    )
    prefill_s += chunks * cost.reduces * reduce_s(tp, prompt_tokens / chunks * cost.reduce_bytes)
    decode_s, width = 0.0, 1 + pinned.drafts
    # A request reads its states once in a step of several tokens.
    each_token = cost._replace(state_bytes=cost.state_bytes // width)
    drafts_s = pinned.drafts * cost.draft_bytes / ceilings.bytes_per_s
    for step in np.arange(1, int(outputs.max()), pinned.tokens):  # prefill samples the first token
        contexts = prompts[outputs > step] + int(step)
        keys = read_keys(model, contexts)
        decode_s += step_s(each_token, len(contexts) * width, keys, ceilings, tp) + drafts_s
    return Floor(prefill_s, decode_s, int(outputs.sum()) / (prefill_s + decode_s))


def _pairs(prompts: NDArray[np.int64], window: int | None) -> float:
    """Return the number of pairs of a query and a key in one layer."""
    rising = prompts if window is None else np.minimum(prompts, window)
    pairs = rising * (rising + 1) / 2 + (prompts - rising) * (window or 0)
    return float(pairs.sum())


def load_shape(
    model: str, folder: Path, drafts: bool = False, images: bool = False
) -> tuple[str, ModelSpec]:
    """Return a model folder and its config.

    model: a name in SHAPES, whose files are written to `folder`, or a model folder. drafts, images:
    as for load_model_spec.
    """
    path = write_model(model, folder) if model in SHAPES else model
    return path, load_model_spec(path, drafts=drafts, images=images)


def load_spec(model: str, drafts: bool = False, images: bool = False) -> ModelSpec:
    """Return the config of `load_shape`, without a folder that stays."""
    with tempfile.TemporaryDirectory() as folder:
        return load_shape(model, Path(folder), drafts, images)[1]


def main(argv: Sequence[str]) -> int:
    """Print the floor and a line of JSON."""
    parser = argparse.ArgumentParser(prog="minisgl bench floor", description=__doc__)
    add_model_flags(parser, "qwen3-0.6b", "--tp", "--quantization", "--kv-cache-dtype")
    add_workload_flags(parser)
    add = flags(parser)
    add("--bandwidth", positive_float, 4.25, "TB/s; of one H200")
    add("--matmul", positive_float, 686.0, "TFLOP/s; of one H200")
    add("--budget", positive_int, 8192, "prompt tokens per step")
    add("--fp8-matmul", positive_float, 1275.0, "TFLOP/s; of one H200")
    add(
        "--acceptance",
        pinned_lengths,
        None,
        "drafts of the draft head in each step, and the tokens of a step, such as 3:3.39",
        metavar="DRAFTS:TOKENS",
    )
    options = parser.parse_args(argv)
    pinned = Pinned(*next(iter(options.acceptance.items()))) if options.acceptance else NO_DRAFTS
    model = load_spec(options.model, drafts=pinned.drafts > 0)
    rates = (options.bandwidth, options.matmul, options.fp8_matmul)
    ceilings = Ceilings(*(1e12 * rate for rate in rates))
    workload = workload_from(options)
    quantization, fp8_kv = options.quantization, options.kv_cache_dtype == "fp8"
    form = (options.budget, options.tp, quantization, fp8_kv, pinned)
    floor = floor_of(model, workload, ceilings, *form)
    stored = stored_weights(model, quantization, with_quantizations())
    cost = with_weights(cost_of(model, options.tp, fp8_kv), model, stored, options.tp)
    outputs = sum(workload.max_tokens)
    print(
        f"{options.model}: a step of 1 token reads {cost.read_bytes(1) / 1e9:.2f} GB of weights, "
        f"a step of 256 tokens {cost.read_bytes(256) / 1e9:.2f} GB; "
        f"{cost.kv_bytes} bytes of KV per token"
    )
    print(
        f"prefill {floor.prefill_s:.2f} s + decode {floor.decode_s:.2f} s = {floor.total_s:.2f} s; "
        f"{outputs:,} output tokens, {floor.tokens_per_s:,.0f} per second"
    )
    if pinned.drafts:
        print(f"{pinned.drafts} drafts, {pinned.tokens:.2f} tokens of a request in a step: pinned")
    print(json.dumps({"model": options.model, **floor._asdict(), "output_tokens": outputs}))
    return 0
