"""Qwen3-Next: gated delta nets in three of four layers, and attention with an output gate."""

from collections.abc import Sequence

import msgspec
import torch

from minisgl.core import ConfigError
from minisgl.kernel.delta import TAPS
from minisgl.layers.attention import OutputGate, QkNorm
from minisgl.layers.delta import DeltaSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.models.compose import FULL, attention_layers, layer_types, model_spec, sparse_layers
from minisgl.models.hf_config import Count, HfConfig, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import LayerSpec, ModelSpec, NormsSpec
from minisgl.moe.spec import ExpertsSpec

DEFAULTS: Raw = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "mtp_num_hidden_layers": 1,  # published checkpoints have a draft head, and no field for it
}
_DELTA = "linear_attention"  # in layer_types


class HfDelta(msgspec.Struct, frozen=True):
    """The fields of config.json that describe gated delta nets.

    full_attention_interval: without layer_types, each layer whose number is a multiple of it has
    attention. attn_output_gate: the outputs of attention have a gate. mamba_ssm_dtype: the dtype of
    the state. output_gate_type: the activation of the gate of a gated delta net.
    mtp_num_hidden_layers: the layers of the draft head; 0: the checkpoint has none. A head with an
    embedding of its own is not used.
    """

    linear_conv_kernel_dim: Count = 4
    linear_key_head_dim: Count = 128
    linear_value_head_dim: Count = 128
    linear_num_key_heads: Count = 16
    linear_num_value_heads: Count = 32
    full_attention_interval: Count = 4
    attn_output_gate: bool = True
    mamba_ssm_dtype: str = "float32"
    output_gate_type: str = "silu"
    mtp_num_hidden_layers: int = 0
    mtp_use_dedicated_embeddings: bool = False


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return hybrid_spec(config, raw, sparse_layers(config, raw, shared=True), grouped=True)


def hybrid_spec(
    config: HfConfig,
    raw: Raw,
    mlps: Sequence[DenseSpec | ExpertsSpec],
    *,
    grouped: bool,
) -> ModelSpec:
    """Return a model of gated delta nets and attention. Raises ConfigError.

    grouped: as in DeltaSpec.
    """
    fields = read_fields(raw, HfDelta, "config.json")
    _check(config, fields)
    kinds = _kinds(config, fields)
    count = kinds.count(FULL)
    rope = rope_of(config, partial=True)
    drafting = 0 if fields.mtp_use_dedicated_embeddings else fields.mtp_num_hidden_layers
    attention = attention_layers(
        config,
        [None] * (count + drafting),
        [rope.rope] * (count + drafting),
        qk_norm=QkNorm.PER_HEAD,
        norm_offset=True,
        bias=config.attention_bias,
        gate=OutputGate.IN_QUERIES if fields.attn_output_gate else None,
    )
    first = iter(attention)
    delta = (
        DeltaSpec(
            fields.linear_num_key_heads,
            fields.linear_num_value_heads,
            fields.linear_key_head_dim,
            fields.linear_value_head_dim,
            layer,
            grouped,
            torch.float32,
        )
        for layer in range(len(kinds) - count)
    )
    mixers = [next(first) if kind == FULL else next(delta) for kind in kinds]
    norms = NormsSpec(offset=True)
    head = LayerSpec(attention[-1], mlps[-1], norms) if drafting else None
    unread = () if drafting else ("mtp.",)
    return model_spec(config, rope, mixers, mlps, norms=norms, draft_head=head, unread=unread)


def _kinds(config: HfConfig, fields: HfDelta) -> list[str]:
    """Return the kind of each layer. Raises ConfigError."""
    layers, interval = range(config.num_layers), fields.full_attention_interval
    default = [_DELTA if (layer + 1) % interval else FULL for layer in layers]
    kinds = layer_types(config, default, _DELTA)
    if FULL not in kinds:
        raise ConfigError(f"a model needs a layer of type {FULL!r}: layer_types has none")
    return kinds


def _check(config: HfConfig, fields: HfDelta) -> None:
    """Raise ConfigError for a setting of gated delta nets that is not supported."""
    check_supported("hidden_act", config.hidden_act, ["silu"])
    check_supported("linear_conv_kernel_dim", fields.linear_conv_kernel_dim, [TAPS])
    check_supported("output_gate_type", fields.output_gate_type, ["silu", "swish"])
    check_supported("mamba_ssm_dtype", fields.mamba_ssm_dtype, ["float32"])
    check_supported("mtp_num_hidden_layers", fields.mtp_num_hidden_layers, [0, 1])
    key, value = fields.linear_num_key_heads, fields.linear_num_value_heads
    if value % key:
        raise ConfigError(
            f"linear_num_value_heads {value} is not a multiple of linear_num_key_heads {key}"
        )
