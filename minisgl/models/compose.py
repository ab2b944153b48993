"""The parts from which a family composes its ModelSpec."""

from collections.abc import Sequence
from typing import Any

import torch

from minisgl.attention.base import AttentionRule
from minisgl.core import ConfigError
from minisgl.kernel.activation import Activation
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.attention import AttentionSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.layers.rotary import Rope
from minisgl.models.hf_config import (
    HfConfig,
    HfExperts,
    ModelSettings,
    Raw,
    check_supported,
    read_fields,
)
from minisgl.models.rope import RopeSettings, rope_of
from minisgl.models.spec import LayerSpec, MixerSpec, ModelSpec, NormsSpec
from minisgl.moe.spec import ExpertsSpec

_DTYPES = ("float32", "bfloat16", "float16")
_GATED = (Activation.SILU, Activation.GELU)
FULL, _SLIDING = "full_attention", "sliding_attention"  # in layer_types
_NORM_BEFORE = NormsSpec()


def transformer(
    config: HfConfig,
    windows: Sequence[int | None],
    mlps: Sequence[DenseSpec | ExpertsSpec] | None = None,
    *,
    rope: RopeSettings | None = None,
    ropes: Sequence[Rope] | None = None,
    norms: NormsSpec = _NORM_BEFORE,
    end_texts: tuple[str, ...] = (),
    **traits: Any,
) -> ModelSpec:
    """Return a model whose layers all have attention. Raises ConfigError.

    mlps: None: all are dense. rope, ropes: the rotary settings of config.json, and the embedding of
    each layer if it does not follow from its window. For the others see ModelSpec and
    attention_layers.
    """
    rope = rope or rope_of(config)
    mixers = attention_layers(config, windows, ropes or rope.of(windows), **traits)
    mlps = mlps or dense_layers(config)
    return model_spec(config, rope, mixers, mlps, norms=norms, end_texts=end_texts)


def model_spec(
    config: HfConfig,
    rope: RopeSettings,
    mixers: Sequence[MixerSpec],
    mlps: Sequence[DenseSpec | ExpertsSpec | None],
    *,
    norms: NormsSpec = _NORM_BEFORE,
    end_texts: tuple[str, ...] = (),
    draft_head: LayerSpec | None = None,
    unread: tuple[str, ...] = (),
    names: dict[str, str] | None = None,
    beside: ExpertsSpec | None = None,
) -> ModelSpec:
    """Return a model with one mixer and at most one MLP for each layer.

    rope: of full attention. beside: as in LayerSpec, for all layers.
    """
    layers = [LayerSpec(*parts, norms, beside=beside) for parts in zip(mixers, mlps, strict=True)]
    ends = config.eos_token_id
    return ModelSpec(
        **{name: getattr(config, name) for name in ModelSettings.__struct_fields__},
        layers=tuple(layers),
        max_position=rope.max_position,
        query_scale=rope.query_scale,
        dtype=dtype_of(config),
        eos_token_ids=tuple(ends if isinstance(ends, list) else [ends]),
        end_texts=end_texts,
        draft_head=draft_head,
        norm_offset=norms.offset,
        unread=unread,
        names=names or {},
    )


def dtype_of(config: HfConfig) -> str:
    """Return the checkpoint's dtype. Raises ConfigError."""
    dtype = config.dtype or config.torch_dtype or "float32"
    check_supported("the checkpoint's dtype", dtype, _DTYPES)
    return dtype


def attention_layers(
    config: HfConfig, windows: Sequence[int | None], ropes: Sequence[Rope], **traits: Any
) -> list[AttentionSpec]:
    """Return the attention of each layer, all with the same heads. Raises ConfigError.

    windows: of each layer in tokens; None: the layer has full attention. traits: further fields of
    AttentionSpec. `sinks` is that of its rule, and `bias` sets both biases.
    """
    if config.use_bidirectional_attention:
        raise ConfigError("use_bidirectional_attention true is not supported: attention is causal")
    q_heads = config.q_heads
    kv_heads = config.num_key_value_heads or q_heads
    if q_heads % kv_heads:
        raise ConfigError(f"{q_heads} attention heads do not divide over {kv_heads} KV heads")
    kv = KVSpec(kv_heads, config.width_of_heads, getattr(torch, dtype_of(config)))
    cap, sinks = config.attn_logit_softcapping, traits.pop("sinks", False)
    if "bias" in traits:
        traits["qkv_bias"] = traits["output_bias"] = traits.pop("bias")
    return [
        AttentionSpec(q_heads, AttentionRule(window, cap, sinks), rope, kv, index, **traits)
        for index, (window, rope) in enumerate(zip(windows, ropes, strict=True))
    ]


def dense_layers(config: HfConfig, *, bias: bool = False, merged: bool = False) -> list[DenseSpec]:
    """Return the dense MLP of each layer. Raises ConfigError."""
    activation = config.hidden_activation or config.hidden_act
    check_supported("hidden_act", activation, _GATED)
    spec = DenseSpec(config.intermediate_size, bias, merged, Activation(activation))
    return [spec] * config.num_layers


def sparse_layers(
    config: HfConfig, raw: Raw, *, shared: bool = False
) -> list[DenseSpec | ExpertsSpec]:
    """Return the MLP of each layer: experts, and dense where config.json says so.

    shared: whether an expert computes all tokens. Raises ConfigError.
    """
    fields = read_experts(raw)
    inner, shared_inner = fields.moe_intermediate_size, fields.shared_expert_intermediate_size
    if shared and shared_inner % inner:
        raise ConfigError(
            f"shared_expert_intermediate_size {shared_inner} is not supported: expected a multiple "
            f"of moe_intermediate_size {inner}"
        )
    experts = ExpertsSpec(
        fields.num_experts,
        fields.num_experts_per_tok,
        inner,
        fields.norm_topk_prob,
        shared=shared_inner // inner if shared else 0,
    )
    dense = dense_layers(config)
    return [experts if fields.in_layer(layer) else mlp for layer, mlp in enumerate(dense)]


def read_experts(raw: Raw) -> HfExperts:
    """Read the fields of a mixture of experts. Raises ConfigError."""
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    key = "num_local_experts" if raw.get("num_experts") is None else "num_experts"
    fields = read_fields({**raw, "num_experts": raw.get(key)}, HfExperts, "config.json")
    if fields.num_experts_per_tok > fields.num_experts:
        raise ConfigError(
            f"num_experts_per_tok {fields.num_experts_per_tok} exceeds {fields.num_experts} experts"
        )
    return fields


def windows_if_enabled(config: HfConfig, first: float | None = None) -> list[int | None]:
    """Return the windows of a model with use_sliding_window: those of the layers from `first` on.

    first: None: max_window_layers in config.json.

    This function and the next three give the window of each layer in tokens; None: the layer has
    full attention. In all of them, layer_types in config.json counts before the rule of the family.
    They raise ConfigError for a layer type that is neither full nor sliding attention.
    """
    layers, first = range(config.num_layers), config.max_window_layers if first is None else first
    return _windows(config, [config.use_sliding_window and layer >= first for layer in layers])


def windows_everywhere(config: HfConfig) -> list[int | None]:
    """Return the windows of a model whose layers all have one."""
    return _windows(config, [True] * config.num_layers)


def windows_by_interval(config: HfConfig, interval: int) -> list[int | None]:
    """Return windows for all layers but those whose number is a multiple of the interval.

    interval: sliding_window_pattern in config.json counts before it.
    """
    pattern = config.sliding_window_pattern
    interval = pattern if type(pattern) is int else interval
    if interval < 1:
        raise ConfigError(f"config.json: sliding_window_pattern is {interval}: expected 1 or more")
    return _windows(config, [(layer + 1) % interval != 0 for layer in range(config.num_layers)])


def windows_from_last(config: HfConfig, interval: int) -> list[int | None]:
    """Return windows for all layers but each interval-th one, counted from the last."""
    last = config.num_layers - 1
    return _windows(config, [(last - layer) % interval != 0 for layer in range(last + 1)])


def _windows(config: HfConfig, slides: list[bool]) -> list[int | None]:
    window = config.sliding_window
    kinds = layer_types(config, [_SLIDING if sliding else FULL for sliding in slides], _SLIDING)
    if window is None or _SLIDING not in kinds:
        return [None] * len(kinds)
    if type(window) is not int or window < 1:
        raise ConfigError(f"config.json: sliding_window is {window!r}: expected an integer >= 1")
    return [window if kind == _SLIDING else None for kind in kinds]


def layer_types(config: HfConfig, default: list[str], other: str) -> list[str]:
    """Return layer_types of config.json, or the default. Raises ConfigError.

    other: the one type that a layer may have besides full attention.
    """
    kinds = default if config.layer_types is None else config.layer_types
    for kind in kinds:
        check_supported("layer type", kind, (FULL, other))
    check_per_layer(config, "layer_types", kinds)
    return kinds


def check_per_layer(config: HfConfig, field: str, values: Sequence[object]) -> None:
    """Raise ConfigError if a field of config.json does not have one entry for each layer."""
    if len(values) != config.num_layers:
        raise ConfigError(
            f"{field} in config.json has {len(values)} entries; expected {config.num_layers}, one "
            "for each layer"
        )
