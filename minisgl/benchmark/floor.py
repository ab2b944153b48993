"""The least time that a workload can take on a machine, from bytes, operations and ceilings.

A step takes max(weight bytes / bandwidth, operations / matmul rate) + KV bytes / bandwidth. Of
experts, those count that some token of the step takes, if tokens choose evenly and independently.
The workload: all prompts are computed first, in chunks of the budget, then all reqs decode
together, fewer and fewer as they end.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.models import SHAPES, write_model
from minisgl.benchmark.workload import Workload, add_workload_flags, workload_from
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
    takes the share `taken`. bf16, one GPU."""

    weight_bytes: int
    operations: int
    kv_bytes: int
    expert_bytes: int = 0
    taken: float = 0.0

    def read_bytes(self, tokens: int) -> float:
        """Of weights, by a step of so many tokens."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.taken) ** tokens)


class Floor(NamedTuple):
    """Seconds, and the output tokens per second that follow."""

    prefill_s: float
    decode_s: float
    tokens_per_s: float

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s


def cost_of(model: ModelConfig) -> Cost:
    """Embeddings are looked up, not read; the head is read."""
    hidden, dim, moe = model.hidden_size, model.head_dim, model.moe
    attention = hidden * dim * (2 * model.q_heads + 2 * model.kv_heads)
    sparse = 0 if moe is None else len(moe.sparse_layers)
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
    model: ModelConfig, workload: Workload, ceilings: Ceilings, budget_tokens: int = 8192
) -> Floor:
    """The least time for `workload`, with prompts in chunks of budget_tokens."""
    cost = cost_of(model)
    prompts, outputs = workload.prompt_lengths(), workload.output_lengths()
    prompt_tokens = int(prompts.sum())
    chunks = -(-prompt_tokens // budget_tokens)
    head = 2 * model.hidden_size * model.vocab_size  # computed for a prompt's last token alone
    prefill_operations: float = (cost.operations - head) * prompt_tokens + head * len(prompts)
    pairs = float((prompts * (prompts + 1) / 2).sum())
    prefill_operations += 4.0 * model.num_layers * model.q_heads * model.head_dim * pairs
    prefill_s = max(
        chunks * cost.read_bytes(budget_tokens) / ceilings.bytes_per_s,
        prefill_operations / ceilings.operations_per_s,
    )
    decode_s = 0.0
    for step in range(1, int(outputs.max())):  # the first token comes from prefill
        running = outputs > step
        tokens = int(running.sum())
        weights = cost.read_bytes(tokens) / ceilings.bytes_per_s
        arithmetic = cost.operations * tokens / ceilings.operations_per_s
        context = int((prompts[running] + step).sum())
        decode_s += max(weights, arithmetic) + context * cost.kv_bytes / ceilings.bytes_per_s
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
    parser.add_argument("--bandwidth", type=float, default=4.25, help="TB/s (4.25: one H200)")
    parser.add_argument("--matmul", type=float, default=686, help="TFLOP/s (686: one H200)")
    parser.add_argument("--budget", type=int, default=8192, help="prompt tokens a step (8192)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        _, model = load_shape(options.model, Path(folder))
    ceilings = Ceilings(options.bandwidth * 1e12, options.matmul * 1e12)
    workload = workload_from(options)
    floor, cost = floor_of(model, workload, ceilings, options.budget), cost_of(model)
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
