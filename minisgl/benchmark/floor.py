"""The least time that a workload can take on a machine, from bytes, operations and ceilings.

A step takes max(weight bytes / bandwidth, operations / matmul rate) + KV bytes / bandwidth. Of
experts, those count that some token of the step takes, if tokens choose evenly and independently.
With several GPUs each has an equal part, and the measured sums between them are added.
The workload: all prompts are computed first, in chunks of the budget, then all reqs decode
together, fewer and fewer as they end.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.flags import positive, whole
from minisgl.benchmark.models import SHAPES, write_model
from minisgl.benchmark.workload import Workload, add_workload_flags, workload_from
from minisgl.core import ConfigError
from minisgl.models import ModelConfig, load_model_config


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured on one H200 with torch 2.11 and CUDA 13.0: a large copy (read plus write) and a
    bf16 matrix product of 8192 x 8192 x 8192."""

    bytes_per_s: float = 4.25e12
    operations_per_s: float = 686e12


class Cost(NamedTuple):
    """weight_bytes: read by each step; operations: of the matrices, for one token; kv_bytes: of
    one token of context, all layers; expert_bytes: of all experts of all layers, of which a token
    takes the share `taken`; sums: between GPUs, of sum_bytes for each token. bf16, on one GPU."""

    weight_bytes: int
    operations: int
    kv_bytes: int
    expert_bytes: int = 0
    taken: float = 0.0
    sums: int = 0
    sum_bytes: int = 0

    def read_bytes(self, tokens: int) -> float:
        """Of weights, by a step of so many tokens."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.taken) ** tokens)


# Sums over GPUs of one host in a CUDA graph, the faster of NCCL 2.28 and torch's symmetric memory,
# 2026-11: microseconds by MB, for bfloat16 rows of 5,120.
_REDUCE_MB = tuple(rows * 10_240 / 1e6 for rows in (1, 8, 64, 256, 2048, 8192))
_REDUCE_US = MappingProxyType(
    {2: (6.4, 7.4, 8.6, 14.9, 99, 309), 4: (6.8, 9.1, 10.5, 19.9, 120, 403)}
)


def reduce_s(tp: int, num_bytes: float) -> float:
    """Seconds of one sum of so many bytes over tp GPUs. Raises ConfigError where none was timed."""
    if tp == 1:
        return 0.0
    if tp not in _REDUCE_US:
        raise ConfigError(f"no sum over {tp} GPUs was measured; measured: 2, 4")
    mb = num_bytes / 1e6
    beyond = max(mb / _REDUCE_MB[-1], 1.0)
    return float(np.interp(mb, _REDUCE_MB, _REDUCE_US[tp])) * beyond / 1e6


class Floor(NamedTuple):
    """Seconds, and the output tokens per second that follow."""

    prefill_s: float
    decode_s: float
    tokens_per_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def cost_of(model: ModelConfig, tp: int = 1) -> Cost:
    """Embeddings are looked up, not read; the head is read. KV heads fewer than tp are copied."""
    whole = _whole_cost(model)
    return whole._replace(
        weight_bytes=whole.weight_bytes // tp,
        operations=whole.operations // tp,
        kv_bytes=whole.kv_bytes // min(tp, model.kv_heads),
        expert_bytes=whole.expert_bytes // tp,
        sums=2 * model.num_layers + 1,
        sum_bytes=2 * model.hidden_size,
    )


def _whole_cost(model: ModelConfig) -> Cost:
    hidden, dim, moe = model.hidden_size, model.head_dim, model.moe
    attention = hidden * dim * (2 * model.q_heads + 2 * model.kv_heads)
    sparse = sum(moe is not None and moe.has_experts(i) for i in range(model.num_layers))
    parameters = model.num_layers * attention + hidden * model.vocab_size
    parameters += (model.num_layers - sparse) * 3 * hidden * model.intermediate_size
    kv = 2 * model.num_layers * model.kv_heads * dim
    if moe is None:
        return Cost(2 * parameters, 2 * parameters, 2 * kv)
    parameters += sparse * hidden * moe.num_experts  # routers
    experts = sparse * 3 * hidden * moe.intermediate_size * moe.num_experts
    taken = moe.experts_per_token / moe.num_experts
    operations = 2 * parameters + int(2 * experts * taken)
    return Cost(2 * parameters, operations, 2 * kv, 2 * experts, taken)


def floor_of(
    model: ModelConfig,
    workload: Workload,
    ceilings: Ceilings,
    budget_tokens: int = 8192,
    tp: int = 1,
) -> Floor:
    """The least time for `workload`, with prompts in chunks of budget_tokens, on tp GPUs."""
    cost = cost_of(model, tp)
    prompts, outputs = workload.prompt_lengths(), workload.output_lengths()
    prompt_tokens = int(prompts.sum())
    chunks = -(-prompt_tokens // budget_tokens)
    # the head is computed for a prompt's last token alone
    head = 2 * model.hidden_size * model.vocab_size // tp
    prefill_operations: float = (cost.operations - head) * prompt_tokens + head * len(prompts)
    pairs = float((prompts * (prompts + 1) / 2).sum())
    prefill_operations += 4.0 * model.num_layers * model.q_heads * model.head_dim * pairs / tp
    prefill_s = max(
        chunks * cost.read_bytes(budget_tokens) / ceilings.bytes_per_s,
        prefill_operations / ceilings.operations_per_s,
    )
    prefill_s += chunks * cost.sums * reduce_s(tp, prompt_tokens / chunks * cost.sum_bytes)
    decode_s = 0.0
    for step in range(1, int(outputs.max())):  # the first token comes from prefill
        running = outputs > step
        tokens = int(running.sum())
        weights = cost.read_bytes(tokens) / ceilings.bytes_per_s
        arithmetic = cost.operations * tokens / ceilings.operations_per_s
        context = int((prompts[running] + step).sum())
        decode_s += max(weights, arithmetic) + context * cost.kv_bytes / ceilings.bytes_per_s
        decode_s += cost.sums * reduce_s(tp, tokens * cost.sum_bytes)
    return Floor(prefill_s, decode_s, int(outputs.sum()) / (prefill_s + decode_s))


def load_shape(model: str, folder: Path) -> tuple[str, ModelConfig]:
    """A folder to load and its config: one of SHAPES, written to `folder`, or a model folder."""
    path = write_model(model, folder) if model in SHAPES else model
    return path, load_model_config(path)


def main(argv: Sequence[str]) -> int:
    """Print the floor and one line of JSON."""
    import tempfile

    parser = argparse.ArgumentParser(prog="minisgl bench floor", description=__doc__)
    parser.add_argument(
        "--model", default="qwen3-0.6b", help=f"{', '.join(SHAPES)}, or a model folder"
    )
    add_workload_flags(parser)
    parser.add_argument("--bandwidth", type=positive, default=4.25, help="TB/s (4.25: one H200)")
    parser.add_argument("--matmul", type=positive, default=686, help="TFLOP/s (686: one H200)")
    parser.add_argument("--budget", type=whole, default=8192, help="prompt tokens a step (8192)")
    parser.add_argument("--tp", type=whole, default=1, help="GPUs that share the model (1)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        _, model = load_shape(options.model, Path(folder))
    ceilings = Ceilings(options.bandwidth * 1e12, options.matmul * 1e12)
    workload = workload_from(options)
    floor = floor_of(model, workload, ceilings, options.budget, options.tp)
    cost = cost_of(model, options.tp)
    outputs = int(np.sum(workload.output_lengths()))
    print(
        f"{options.model}: {cost.read_bytes(1) / 1e9:.2f} GB of weights read by a step of 1 token, "
        f"{cost.read_bytes(256) / 1e9:.2f} GB by one of 256, "
        f"{cost.kv_bytes} bytes of KV a token"
    )
    print(
        f"prefill {floor.prefill_s:.2f} s + decode {floor.decode_s:.2f} s = {floor.total_s:.2f} s; "
        f"{floor.tokens_per_s:,.0f} of {outputs:,} output tokens a second"
    )
    print(json.dumps({"model": options.model, **floor._asdict(), "output_tokens": outputs}))
    return 0
