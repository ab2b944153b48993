"""The floor of a step: its shortest possible time, from bytes, operations and the hardware.

A step takes max(weight bytes / bandwidth, operations / matmul rate) + (KV bytes + bytes of
recurrent states) / bandwidth. The weights of an expert count when at least one token of the step is
routed to it; routing is assumed to be uniform and independent. With several GPUs each holds an
equal part of the model, and the measured time of the all-reduces is added.
"""

from collections import Counter
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from minisgl.core import ConfigError
from minisgl.layers.attention import AttentionSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.models.quantization import StoredWeights
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates of the hardware.

    The defaults were measured on one H200 with torch 2.11 and CUDA 13.0: a large copy (reads plus
    writes), a bf16 matrix product of 8192 x 8192 x 8192, and FP8 products of 8,192 rows with scales
    for rows and channels.
    """

    bytes_per_s: float = 4.25e12
    operations_per_s: float = 686e12
    fp8_operations_per_s: float = 1275e12

    def arithmetic_s(self, operations: float, fp8_operations: float) -> float:
        """Return the seconds of `operations`, of which fp8_operations have FP8 operands."""
        plain_s = (operations - fp8_operations) / self.operations_per_s
        return plain_s + fp8_operations / self.fp8_operations_per_s


class Cost(NamedTuple):
    """Bytes and operations of a model on one GPU, in bf16 or with FP8 weights.

    weight_bytes  bytes of the weights that every step reads.
    operations    floating-point operations of the matrix products, for one token.
    kv_bytes      bytes of the KV of one token, all layers.
    expert_bytes  bytes of the weights of all experts of all layers.
    expert_share  fraction of the experts to which one token is routed.
    reduces       number of all-reduces of a step.
    reduce_bytes  bytes of one all-reduce for each token of the step.
    fp8_operations
                  the part of `operations` that may have FP8 operands.
    state_bytes   bytes of recurrent states and their history that a decode request moves.
    draft_bytes   bytes of the weights that the draft head reads for a draft of one request.
    """

    weight_bytes: int
    operations: int
    kv_bytes: int
    expert_bytes: int = 0
    expert_share: float = 0.0
    reduces: int = 0
    reduce_bytes: int = 0
    fp8_operations: int = 0
    state_bytes: int = 0
    draft_bytes: int = 0

    def read_bytes(self, tokens: int) -> float:
        """Return the expected weight bytes that a step of `tokens` tokens reads."""
        return self.weight_bytes + self.expert_bytes * (1 - (1 - self.expert_share) ** tokens)


_PAGE_SIZE = 16  # tokens; states are written once in a page

# Microseconds of an all-reduce over the GPUs of one host in a CUDA graph, by MB, for bfloat16 rows
# of 5,120. The faster of NCCL 2.28 and torch's symmetric memory, measured 2026-11.
_REDUCE_MB = tuple(rows * 10_240 / 1e6 for rows in (1, 8, 64, 256, 2048, 8192))
_REDUCE_US = MappingProxyType(
    {2: (6.4, 7.4, 8.6, 14.9, 99, 309), 4: (6.8, 9.1, 10.5, 19.9, 120, 403)}
)
MEASURED_TP = (1, *_REDUCE_US)


def reduce_s(tp: int, num_bytes: float) -> float:
    """Return the seconds of an all-reduce of num_bytes over tp GPUs.

    Raises ConfigError for a number of GPUs that was not measured.
    """
    if tp == 1:
        return 0.0
    if tp not in MEASURED_TP:
        raise ConfigError(f"all-reduce over {tp} GPUs was not measured; measured: 2, 4 GPUs")
    mb = num_bytes / 1e6
    beyond = max(mb / _REDUCE_MB[-1], 1.0)
    return float(np.interp(mb, _REDUCE_MB, _REDUCE_US[tp])) * beyond / 1e6


def cost_of(model: ModelSpec, tp: int = 1, fp8_kv: bool = False) -> Cost:
    """Return the cost of a model on each of tp GPUs. fp8_kv: keys and values are stored in FP8.

    A step reads the whole output head, but only a few rows of the embedding. If there are fewer KV
    heads than GPUs, each GPU holds a copy of one head.
    """
    total = _single_gpu_cost(model)
    kinds = [mixer.kv._replace(dtype=torch.bfloat16, fp8=fp8_kv) for mixer in model.attention]
    return total._replace(
        weight_bytes=total.weight_bytes // tp,
        operations=total.operations // tp,
        kv_bytes=sum(kv.of_rank(tp).token_bytes for kv in kinds),
        expert_bytes=total.expert_bytes // tp,
        reduces=1 + sum(1 + len(one.mlps) + (one.input is not None) for one in model.layers),
        reduce_bytes=2 * model.hidden_size,
        state_bytes=sum(spec.step_bytes(_PAGE_SIZE) for spec in model.states) // tp,
        draft_bytes=total.draft_bytes // tp,
    )


def _single_gpu_cost(model: ModelSpec) -> Cost:
    """The cost without the KV and the all-reduces."""
    hidden = model.hidden_size
    parameters, experts, computed = hidden * model.vocab_size, 0, 0
    for layer in model.layers:
        parameters += layer.mixer.weights(hidden)
        parameters += sum(_mlp_weights(mlp, hidden) for mlp in layer.mlps)
        if layer.input is not None:  # two linears, and the layer's part of that for all layers
            parameters += 3 * hidden * layer.input.width
    for sparse in model.experts:
        one = (sparse.products + 1) * hidden * sparse.inner
        experts += one * sparse.num_experts
        computed += one * sparse.top_k
    drafts = 0
    if model.draft_head is not None:
        mixer, mlp, *_ = model.draft_head
        drafts = hidden * (model.vocab_size + 2 * hidden) + mixer.weights(hidden)
        drafts += sum(_mlp_weights(each, hidden) for each in model.draft_head.mlps)
        if isinstance(mlp, ExpertsSpec):
            drafts += (mlp.products + 1) * hidden * mlp.inner * mlp.top_k
        # Each step stores the keys and values of the head for all its tokens.
        assert isinstance(mixer, AttentionSpec), "a draft head has attention; this is a bug"
        parameters += 2 * hidden * hidden + mixer.stored_weights(hidden)
    share = computed / experts if experts else 0.0
    cost = Cost(2 * parameters, 2 * (parameters + computed), 0, 2 * experts, share)
    return cost._replace(draft_bytes=2 * drafts)


def _mlp_weights(mlp: DenseSpec | ExpertsSpec, hidden: int) -> int:
    """Return the number of weights of an MLP that every token reads: all but the experts."""
    if isinstance(mlp, ExpertsSpec):
        return hidden * (mlp.num_experts + (mlp.products + 1) * mlp.shared * mlp.inner)
    return (mlp.activation.products + 1) * hidden * mlp.inner


def with_weights(cost: Cost, model: ModelSpec, stored: StoredWeights, tp: int = 1) -> Cost:
    """Return the cost with these weights. Drafts read a copy of the output head in FP8."""
    if stored.name == "none":
        return cost
    ratio = stored.bits / 16
    if not stored.linears:
        return cost._replace(expert_bytes=int(cost.expert_bytes * ratio))
    kept, kept_of_drafts = _bf16_bytes(model, tp)
    copy = 0 if model.draft_head is None else model.hidden_size * model.vocab_size // tp
    of_drafts = cost.draft_bytes - kept_of_drafts - 2 * copy
    cost = cost._replace(
        weight_bytes=kept + int((cost.weight_bytes - kept) * ratio),
        expert_bytes=int(cost.expert_bytes * ratio),
        draft_bytes=int(of_drafts * ratio) + kept_of_drafts + copy,
    )
    # A weight of 2 bytes has 2 operations, so `kept` is also the number of the bf16 operations.
    is_fp8 = stored.name == "fp8"
    return cost._replace(fp8_operations=cost.operations - kept) if is_fp8 else cost


def _bf16_bytes(model: ModelSpec, tp: int) -> tuple[int, int]:
    """Return the bytes of the weights that no format changes, and those that drafts read of them.

    The output head and the routers stay bf16, and the projection in front of a draft head.
    """
    hidden, head = model.hidden_size, model.draft_head
    weights = model.vocab_size + sum(experts.num_experts for experts in model.experts)
    kept = 2 * weights * hidden // tp
    if head is None:
        return kept, 0
    of_drafts = projection = 4 * hidden * hidden // tp
    if isinstance(head.mlp, ExpertsSpec):
        of_drafts += 2 * hidden * head.mlp.num_experts // tp
    return kept + projection, of_drafts


def step_s(
    cost: Cost, tokens: int, context_tokens: float, ceilings: Ceilings, tp: int = 1
) -> float:
    """Return the floor of a decode step in seconds.

    tokens: requests of the step, each with one token. context_tokens: tokens of all their contexts;
    with window layers, the mean over the layers of the tokens that a layer reads.
    """
    weights = cost.read_bytes(tokens) / ceilings.bytes_per_s
    arithmetic = tokens * ceilings.arithmetic_s(cost.operations, cost.fp8_operations)
    reduces = cost.reduces * reduce_s(tp, tokens * cost.reduce_bytes) if cost.reduces else 0.0
    read = context_tokens * cost.kv_bytes + tokens * cost.state_bytes
    return max(weights, arithmetic) + read / ceilings.bytes_per_s + reduces


def read_keys(model: ModelSpec, contexts: NDArray[np.signedinteger[Any]]) -> float:
    """Return the keys that a layer reads in a decode step, the mean over the layers by their bytes.

    contexts: tokens of each request's context.
    """
    return sum(
        share * float(np.minimum(contexts, window or contexts).sum())
        for window, share in windows_of(model)
    )


def windows_of(model: ModelSpec) -> list[tuple[int | None, float]]:
    """Each window of the model's layers, and its share of the bytes of keys and values of a token.

    None: full attention.
    """
    sizes = Counter[int | None]()
    for mixer in model.attention:
        sizes[mixer.rule.window] += mixer.kv.stored_bytes
    return [(window, size / sizes.total()) for window, size in sizes.items()]


def operations_of_pairs(model: ModelSpec) -> Counter[int | None]:
    """Return the operations of a query token with one key, in all layers of each window."""
    operations = Counter[int | None]()
    for mixer in model.attention:
        operations[mixer.rule.window] += 4 * mixer.q_heads * mixer.kv.head_dim
    return operations
