"""The memory and the floor of a configuration, computed from a model's config.json.

The weights are exact: they are the parameters of a rank's model on the meta device. The memory of
steps and CUDA graphs, which a starting engine measures, is predicted from sizes of tensors and from
three starts on one H200. The pages follow from both by the engine's own rule (engine/memory.py).
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import torch

from minisgl.benchmark.floor import Cost, cost_of, reduce_s, step_s
from minisgl.core import ConfigError, EngineConfig
from minisgl.distributed.comm import TPInfo
from minisgl.engine import memory
from minisgl.engine.check import LoneRank, share_of
from minisgl.kvcache.pool import kv_page_bytes
from minisgl.layers.linear import LinearMethod
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, local_kv_spec
from minisgl.models.loader import materialise
from minisgl.planning.gpus import Gpu

_BATCHES = (1, 8, 32, 64, 128, 256)
_TYPICAL_TOKENS = 1024  # prompt and answer of the requests for which the floor is computed
_MIB = 2**20
# The remainder of Qwen3-0.6B, 8B and 14B on one H200 (docs/operations.md, "Size"), without the
# tensors that _remainder_bytes computes, is _FIXED_BYTES + _ACTIVATION_SHARE * the largest
# activations of a step. The three starts deviate by at most 4 MiB.
_FIXED_BYTES = 883 * _MIB
_ACTIVATION_SHARE = 1.444
_WORKSPACE_BYTES = 128 * _MIB  # FlashInfer's float workspace
_PEER_BYTES = 240 * _MIB  # buffers that tensor-parallel ranks share
_GRAPH_REQS = 256  # requests of the largest decode graph
# Values of quantization_config.quant_method that store one byte for each weight.
_FP8_METHODS = ("fp8", "compressed-tensors", "fbgemm_fp8", "modelopt")


class Storage(NamedTuple):
    """How weights or keys and values are stored: bytes of an element, and of each row's scale."""

    item: int
    scale: int = 0


# The stored formats by name. Other names mean the model's dtype.
WEIGHTS: Mapping[str, Storage] = MappingProxyType({"fp8": Storage(1, 4)})
KV: Mapping[str, Storage] = MappingProxyType({"fp8": Storage(1, 2)})


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What fits on `tp` GPUs. Sizes are in bytes, for each GPU.

    kv_token_bytes     keys and values of one token.
    remainder_bytes    CUDA context, workspaces, the largest step and the CUDA graphs, as predicted.
    requests           number of requests that fit, by the tokens of each.
    floor_ms           shortest time of a token, by the number of requests that decode together.
                       Each has 1,024 tokens, or the context if that is shorter. None: they do not
                       fit.
    floor_has_reduces  False if the floor lacks the time of the all-reduces.
    settings           flags that differ from the defaults.
    """

    gpu: str
    gpu_bytes: int
    tp: int
    dtype: str
    quantization: str
    kv_cache_dtype: str
    context: int
    weight_bytes: int
    remainder_bytes: int
    kv_bytes: int
    kv_token_bytes: int
    pages: int
    tokens: int
    requests: dict[int, int]
    floor_ms: dict[int, float | None]
    floor_has_reduces: bool
    settings: list[str]


def make_plan(
    config: EngineConfig,
    model: ModelConfig,
    gpu: Gpu,
    quantization: str = "none",
    kv_cache_dtype: str = "none",
    max_chunk_tokens: int = 8192,
) -> Plan:
    """Return the plan of an engine. Raises ConfigError, as the engine does.

    quantization, kv_cache_dtype: names in WEIGHTS and KV, or any other name for the model's dtype.
    """
    flags = [f"--quantization={quantization}"] if quantization in WEIGHTS else []
    flags += [f"--kv-cache-dtype={kv_cache_dtype}"] if kv_cache_dtype in KV else []
    if model.quantization is not None:
        quantization, model = _stored_quantization(model)
    tp = TPInfo(0, config.tp_size)
    dtype = memory.resolve_dtype(config, model, torch.device("cuda"))
    context = memory.resolve_max_seq_len(config, model)
    share = share_of(model, tp, dtype)
    materialise(share, torch.device("meta"), dtype)
    weights = _weight_bytes(share, WEIGHTS.get(quantization))
    token_bytes = _kv_token_bytes(model, tp, dtype, KV.get(kv_cache_dtype))
    remainder = _remainder_bytes(config, model, gpu, context, dtype, max_chunk_tokens)
    # The remainder includes the memory that is not free when the engine starts.
    available = memory.kv_bytes_left(config, gpu.memory_bytes, weights + remainder)
    page_bytes = token_bytes * config.page_size
    pages = config.num_pages or memory.pages_that_fit(config, available, page_bytes, context)
    tokens = max(pages, 0) * config.page_size
    cost, has_reduces = _stored_cost(model, tp, dtype, WEIGHTS.get(quantization), token_bytes)
    sizes = sorted({size for size in (_TYPICAL_TOKENS, 4096, 16_384) if size < context} | {context})
    return Plan(
        gpu=gpu.name,
        gpu_bytes=gpu.memory_bytes,
        tp=config.tp_size,
        dtype=str(dtype).removeprefix("torch."),
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        context=context,
        weight_bytes=weights,
        remainder_bytes=remainder,
        kv_bytes=tokens * token_bytes,
        kv_token_bytes=token_bytes,
        pages=max(pages, 0),
        tokens=tokens,
        requests={size: min(tokens // size, config.max_running_reqs) for size in sizes},
        floor_ms=_floor_ms(cost, gpu, tp.size, tokens, min(context, _TYPICAL_TOKENS)),
        floor_has_reduces=has_reduces,
        settings=flags + _settings(config, context, tokens),
    )


def _stored_quantization(model: ModelConfig) -> tuple[str, ModelConfig]:
    """Return the name of a quantised checkpoint's format, and the model without quantisation."""
    method = str((model.quantization or {}).get("quant_method", "unknown"))
    if method not in _FP8_METHODS:
        raise ConfigError(
            f"quantization_config ({method}) is not known; known: {', '.join(_FP8_METHODS)}"
        )
    return "fp8", dataclasses.replace(model, quantization=None)


def _weight_bytes(share: CausalLM, stored: Storage | None) -> int:
    """The bytes of a rank's weights. stored: the format of linear layers and experts."""
    sizes = {}  # by parameter: the embedding and the head may be one
    for module in share.modules():
        for parameter in module.parameters(recurse=False):
            is_expert = parameter.dim() == 3
            is_matrix = isinstance(module, LinearMethod) and parameter.dim() == 2
            sizes[parameter] = parameter.nbytes
            if stored is not None and (is_expert or is_matrix):
                rows = parameter.numel() // parameter.shape[-1]
                sizes[parameter] = parameter.numel() * stored.item + rows * stored.scale
    return sum(sizes.values())


def _kv_token_bytes(
    model: ModelConfig, tp: TPInfo, dtype: torch.dtype, stored: Storage | None
) -> int:
    spec = local_kv_spec(model, LoneRank(tp), dtype)
    if stored is None:
        return kv_page_bytes(spec, model.num_kv_layers, 1)
    return 2 * model.num_kv_layers * spec.kv_heads * (spec.head_dim * stored.item + stored.scale)


def _remainder_bytes(
    config: EngineConfig,
    model: ModelConfig,
    gpu: Gpu,
    context: int,
    dtype: torch.dtype,
    max_chunk_tokens: int,
) -> int:
    """Predict the memory of a rank besides weights and KV pages."""
    tp, rows, item = config.tp_size, config.max_running_reqs + 1, dtype.itemsize
    page_table, token_pool = rows * -(-context // config.page_size), rows * (context + 1)
    tables = 4 * (page_table + token_pool + context * model.head_dim)  # the last: rotary embedding
    logits = min(config.max_running_reqs, _GRAPH_REQS) * (model.vocab_size // tp) * item
    kv_heads = max(model.kv_heads // tp, 1)
    copied = 2 * context * kv_heads * model.head_dim * item if gpu.copies else 0
    shared = _PEER_BYTES if tp > 1 else 0
    # Gate and up, their product, and the residual stream before and after the MLP.
    widest = 3 * model.intermediate_size // tp + 2 * model.hidden_size
    if model.moe is not None:
        inner = model.moe.moe_intermediate_size // tp
        widest = model.moe.num_experts_per_tok * (inner + model.hidden_size) + 2 * model.hidden_size
    activations = int(_ACTIVATION_SHARE * max_chunk_tokens * widest * item)
    return _FIXED_BYTES + _WORKSPACE_BYTES + tables + logits + copied + shared + activations


def _stored_cost(
    model: ModelConfig, tp: TPInfo, dtype: torch.dtype, stored: Storage | None, token_bytes: int
) -> tuple[Cost, bool]:
    """The cost of a step in the stored formats, and whether it has the time of the all-reduces.

    benchmark.floor computes costs in bfloat16. The output head keeps the model's dtype.
    """
    cost = cost_of(model, tp.size)
    head = 2 * model.hidden_size * model.vocab_size // tp.size
    own = dtype.itemsize / 2
    linear = own if stored is None else stored.item / 2
    try:
        reduce_s(tp.size, 0)
    except ConfigError:  # not measured for this number of GPUs
        reduces = 0
    else:
        reduces = cost.reduces
    cost = cost._replace(
        weight_bytes=int((cost.weight_bytes - head) * linear + head * own),
        expert_bytes=int(cost.expert_bytes * linear),
        kv_bytes=token_bytes,
        reduces=reduces,
    )
    return cost, reduces == cost_of(model, tp.size).reduces


def _floor_ms(cost: Cost, gpu: Gpu, tp: int, tokens: int, context: int) -> dict[int, float | None]:
    """The floor of a token by the number of requests; empty if the rates of the GPU are unknown."""
    if gpu.ceilings is None:
        return {}
    return {
        size: 1e3 * step_s(cost, size, size * context, gpu.ceilings, tp)
        if size * context <= tokens
        else None
        for size in _BATCHES
    }


def _settings(config: EngineConfig, context: int, tokens: int) -> list[str]:
    """The flags to set so that the requests fit. Empty: the defaults fit, or nothing fits."""
    flags = [f"--tensor-parallel-size={config.tp_size}"] if config.tp_size > 1 else []
    shown = min(context, tokens)
    if 0 < tokens < context:
        flags.append(f"--max-seq-len-override={tokens}")
    elif config.max_seq_len is not None:
        flags.append(f"--max-seq-len-override={context}")
    together = tokens // min(shown, _TYPICAL_TOKENS) if shown else 0
    if 0 < together < config.max_running_reqs:
        flags.append(f"--max-running-requests={together}")
    return flags
