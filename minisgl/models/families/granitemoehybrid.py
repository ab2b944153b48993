"""Granite 4: Mamba-2 in most layers, attention without rotary embedding in the others.

The factors are those of Granite 3. Models without Mamba-2 layers have a rotary embedding.
"""

from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.kernel.delta import TAPS
from minisgl.layers.mamba import MambaSpec
from minisgl.layers.mlp import DenseNames, DenseSpec
from minisgl.models.compose import (
    FULL,
    attention_layers,
    check_per_layer,
    model_spec,
    read_experts,
)
from minisgl.models.families.granite import multipliers
from minisgl.models.hf_config import Count, HfConfig, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertNames, ExpertsSpec

_MAMBA = "linear_attention"
# transformers 4 and the published checkpoints have other names of the types of layers.
_KINDS = {"mamba": _MAMBA, "attention": FULL, _MAMBA: _MAMBA, FULL: FULL}
_DENSE = DenseNames("shared_mlp", "input_linear", "output_linear")
_EXPERTS = ExpertNames(
    block="",
    down="output_linear",
    router="block_sparse_moe.router.layer",
    shared="shared_mlp",
    shared_gate_up="input_linear",
    fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
)
# The range of the step sizes: no limit, in Python's JSON and in that of transformers 5.
_UNLIMITED = ((0.0, float("inf")), [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


class HfGranite4(msgspec.Struct, frozen=True):
    """The fields of config.json that only this family has.

    shared_intermediate_size: the inner size of the MLP of all tokens. num_local_experts: 0: there
    is no other MLP. mamba_d_head: "auto": follows from the number of heads.
    """

    mamba_n_heads: Count = 128
    mamba_n_groups: Count = 1
    mamba_d_state: Count = 256
    mamba_d_head: int | str = "auto"
    mamba_d_conv: Count = 4
    mamba_expand: Count = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: Any = (0.0, float("inf"))
    num_local_experts: int = 8
    shared_intermediate_size: Count = 1024
    position_embedding_type: str = "nope"


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields = read_fields(raw, HfGranite4, "config.json")
    _check(config, fields)
    for kind in config.layer_types or ():
        check_supported("layer type", kind, _KINDS)
    kinds = [_KINDS[kind] for kind in config.layer_types or ()]
    check_per_layer(config, "layer_types", kinds)
    if FULL not in kinds:
        raise ConfigError(f"a model needs a layer of type {FULL!r}: layer_types has none")
    settings = rope_of(config)
    rope = settings.rope if fields.position_embedding_type == "rope" else settings.none
    count = kinds.count(FULL)
    attention = iter(
        attention_layers(config, [None] * count, [rope] * count, bias=config.attention_bias)
    )
    heads = fields.mamba_n_heads
    head_dim = config.hidden_size * fields.mamba_expand // heads
    shape = fields.mamba_n_groups, heads, fields.mamba_d_state, head_dim
    mamba = (MambaSpec(*shape, layer) for layer in range(len(kinds) - count))
    mixers = [next(attention) if kind == FULL else next(mamba) for kind in kinds]
    model = model_spec(config, settings, mixers, [_mlp(config, fields, raw)] * len(kinds))
    return msgspec.structs.replace(model, multipliers=multipliers(config))


def _mlp(config: HfConfig, fields: HfGranite4, raw: Raw) -> DenseSpec | ExpertsSpec:
    """Return the MLP of every layer. Raises ConfigError."""
    shared, inner = fields.shared_intermediate_size, config.intermediate_size
    if not fields.num_local_experts:
        return DenseSpec(shared, merged=True, names=_DENSE)
    if shared % inner:
        raise ConfigError(
            f"shared_intermediate_size {shared} is not supported: expected a multiple of "
            f"intermediate_size {inner}"
        )
    experts = read_experts(raw)
    return ExpertsSpec(
        experts.num_experts,
        experts.num_experts_per_tok,
        inner,
        renormalise=True,
        shared=shared // inner,
        shared_gate=False,
        names=_EXPERTS,
    )


def _check(config: HfConfig, fields: HfGranite4) -> None:
    """Raise ConfigError for a setting that is not supported."""
    check_supported("hidden_act", config.hidden_act, ["silu"])
    check_supported("position_embedding_type", fields.position_embedding_type, ["nope", "rope"])
    heads = fields.mamba_n_heads
    check_mamba(fields, "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
    check_supported("mamba_conv_bias", fields.mamba_conv_bias, [True])
    inner = fields.mamba_expand * config.hidden_size
    if fields.mamba_d_head not in ("auto", inner // heads) or inner % heads:
        raise ConfigError(
            f"mamba_d_head {fields.mamba_d_head} of {heads} mamba_n_heads does not give "
            f"{inner} channels, mamba_expand times hidden_size"
        )


def check_mamba(fields: msgspec.Struct, heads: str, groups: str, state: str, taps: str) -> None:
    """Raise ConfigError for a setting of Mamba-2 that is not supported.

    heads, groups, state, taps: the names of these settings in the family.
    """
    check_supported(taps, getattr(fields, taps), [TAPS])
    for setting, supported in (("mamba_proj_bias", [False]), ("time_step_limit", _UNLIMITED)):
        check_supported(setting, getattr(fields, setting), supported)
    of_heads, of_groups, size = (getattr(fields, name) for name in (heads, groups, state))
    if of_heads % of_groups:
        raise ConfigError(f"{heads} {of_heads} is not a multiple of {groups} {of_groups}")
    if size < 16 or size & (size - 1):
        raise ConfigError(f"{state} {size} is not supported: expected a power of two >= 16")
