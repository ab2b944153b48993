"""Nemotron-H and Nemotron 3: Mamba-2, attention without rotary embedding, and MLPs without a gate.

A layer of the checkpoint is a mixer or an MLP. A mixer and the MLP after it are one LayerSpec.
"""

from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.kernel.activation import Activation
from minisgl.layers.attention import Attention
from minisgl.layers.mamba import Mamba, MambaSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.models.compose import FULL, attention_layers, model_spec
from minisgl.models.families.granitemoehybrid import check_mamba
from minisgl.models.hf_config import Count, HfConfig, PartCount, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertNames, ExpertsSpec

# The number of layers is that of layers_block_type.
DEFAULTS: Raw = {"num_hidden_layers": 1, "head_dim": 128, "num_key_value_heads": 8}

_MAMBA = "linear_attention"
_LETTERS = {"M": _MAMBA, "*": FULL, "E": "moe", "-": "mlp"}  # of hybrid_override_pattern
# transformers 4 has other names of the types of layers.
_KINDS = {"mamba": _MAMBA, "attention": FULL} | {kind: kind for kind in _LETTERS.values()}

_MIXERS = {_MAMBA: Mamba.name, FULL: Attention.name}  # the module of each


class HfNemotronH(msgspec.Struct, frozen=True):
    """The fields of config.json that only this family has.

    layers_block_type: the type of each layer; without it, hybrid_override_pattern has a letter for
    each. moe_latent_size: the width of the experts' input, if it is not that of the stream.
    """

    layers_block_type: list[str] | None = None
    hybrid_override_pattern: str = ""
    mlp_hidden_act: str = "relu2"
    mamba_hidden_act: str = "silu"
    mamba_num_heads: Count = 128
    mamba_head_dim: Count = 64
    n_groups: Count = 8
    ssm_state_size: Count = 128
    conv_kernel: Count = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    mamba_proj_bias: bool = False
    mamba_ssm_cache_dtype: str = "float32"
    time_step_limit: Any = (0.0, float("inf"))
    n_routed_experts: PartCount = 8
    num_experts_per_tok: Count = 2
    moe_intermediate_size: Count = 7688
    moe_shared_expert_intermediate_size: Count = 7688
    moe_latent_size: int | None = None
    n_shared_experts: Count = 1
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: Count = 1
    layer_norm_epsilon: float = 1e-5

    @property
    def kinds(self) -> list[str]:
        """The type of each layer of the checkpoint. Raises ConfigError."""
        kinds = self.layers_block_type
        if kinds is None:
            kinds = [_LETTERS.get(letter, letter) for letter in self.hybrid_override_pattern]
        for kind in kinds:
            check_supported("layer type", kind, _KINDS)
        return [_KINDS[kind] for kind in kinds]


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields = read_fields(raw, HfNemotronH, "config.json")
    _check(config, fields)
    kinds = fields.kinds
    if FULL not in kinds:
        raise ConfigError(f"a model needs a layer of type {FULL!r}: layers_block_type has none")
    config = msgspec.structs.replace(config, norm_eps=fields.layer_norm_epsilon)
    rope, count = rope_of(config), kinds.count(FULL)
    attention = iter(attention_layers(config, [None] * count, [rope.none] * count))
    shape = fields.n_groups, fields.mamba_num_heads, fields.ssm_state_size, fields.mamba_head_dim
    mamba = (MambaSpec(*shape, layer) for layer in range(kinds.count(_MAMBA)))
    mixers = [
        next(mamba) if kind == _MAMBA else next(attention) for kind in kinds if kind in _MIXERS
    ]
    dense = DenseSpec(config.intermediate_size, activation=Activation.RELU2)
    # The MLP of a mixer is the layer after it.
    following = [
        after for kind, after in zip(kinds, [*kinds[1:], FULL], strict=True) if kind in _MIXERS
    ]
    experts = _experts(fields) if "moe" in kinds else None
    of_kind = {"moe": experts, "mlp": dense}
    mlps = [of_kind.get(kind) for kind in following]
    return model_spec(config, rope, mixers, mlps, unread=("mtp.",), names=_names(kinds))


def _names(kinds: list[str]) -> dict[str, str]:
    """Return ModelSpec.names. Raises ConfigError for an MLP without a mixer before it."""
    names = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
    layer, before = -1, "mlp"
    for number, kind in enumerate(kinds):
        norm, module = "input_layernorm", _MIXERS.get(kind, "mlp")
        if kind in _MIXERS:
            layer += 1
        elif before in _MIXERS:
            norm = "post_attention_layernorm"
        else:
            raise ConfigError(
                f"layer {number} of config.json is of type {kind!r}: expected an attention or "
                "Mamba-2 layer before it"
            )
        own, stored, before = f"model.layers.{layer}", f"backbone.layers.{number}", kind
        names |= {f"{own}.{norm}": f"{stored}.norm", f"{own}.{module}": f"{stored}.mixer"}
    return names


def _experts(fields: HfNemotronH) -> ExpertsSpec:
    """Return a mixture of experts. Raises ConfigError."""
    inner, shared = fields.moe_intermediate_size, fields.moe_shared_expert_intermediate_size
    if shared % inner:
        raise ConfigError(
            f"moe_shared_expert_intermediate_size {shared} is not supported: expected a multiple "
            f"of moe_intermediate_size {inner}"
        )
    return ExpertsSpec(
        fields.n_routed_experts,
        fields.num_experts_per_tok,
        inner,
        fields.norm_topk_prob,
        shared=shared // inner,
        shared_gate=False,
        sigmoid=True,
        scale=fields.routed_scaling_factor,
        activation=Activation.RELU2,
        names=ExpertNames(shared="shared_experts"),
    )


def _check(config: HfConfig, fields: HfNemotronH) -> None:
    """Raise ConfigError for a setting that is not supported."""
    for setting in ("attention_bias", "mlp_bias"):
        check_supported(setting, getattr(config, setting), [False])
    check_supported("sliding_window", config.sliding_window, [None])
    for setting, supported in (
        ("mlp_hidden_act", "relu2"),
        ("mamba_hidden_act", "silu"),
        ("use_conv_bias", True),
        ("use_bias", False),
        ("mamba_ssm_cache_dtype", "float32"),
        ("moe_latent_size", None),
        ("n_shared_experts", 1),
        ("n_group", 1),
    ):
        check_supported(setting, getattr(fields, setting), [supported])
    check_mamba(fields, "mamba_num_heads", "n_groups", "ssm_state_size", "conv_kernel")
