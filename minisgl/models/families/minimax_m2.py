"""MiniMax-M2: experts chosen by sigmoids with a correction, and a norm over all query heads."""

import msgspec

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import read_experts, transformer
from minisgl.models.hf_config import Count, HfConfig, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertNames, ExpertsSpec

DEFAULTS: Raw = {"head_dim": 128, "rope_theta": 5e6, "num_local_experts": 256}
_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", correction="e_score_correction_bias")


class HfMiniMaxM2(msgspec.Struct, frozen=True):
    """The fields of config.json that only this family has.

    rotary_dim: the elements of a head that rotate; None: partial_rotary_factor counts.
    attn_type_list: 1 for each layer with full attention.
    """

    rotary_dim: Count | None = None
    scoring_func: str = "sigmoid"
    use_routing_bias: bool = True
    use_qk_norm: bool = True
    qk_norm_type: str = "per_layer"
    shared_intermediate_size: int = 0
    attn_type_list: list[int] = []


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields = read_fields(raw, HfMiniMaxM2, "config.json")
    check_supported("scoring_func", fields.scoring_func, ["sigmoid"])
    check_supported("use_routing_bias", fields.use_routing_bias, [True])
    check_supported("use_qk_norm", fields.use_qk_norm, [True])
    check_supported("qk_norm_type", fields.qk_norm_type, ["per_layer"])
    check_supported("shared_intermediate_size", fields.shared_intermediate_size, [0])
    for kind in fields.attn_type_list:
        check_supported("attn_type_list", kind, [1])
    if fields.rotary_dim is not None:
        fraction = fields.rotary_dim / config.width_of_heads
        config = msgspec.structs.replace(config, partial_rotary_factor=fraction)
    routed = read_experts(raw)
    experts = ExpertsSpec(
        routed.num_experts,
        routed.num_experts_per_tok,
        config.intermediate_size,
        renormalise=True,
        sigmoid=True,
        names=_NAMES,
    )
    layers, rope = config.num_layers, rope_of(config, partial=True)
    windows, mlps = [None] * layers, [experts] * layers
    return transformer(config, windows, mlps, rope=rope, qk_norm=QkNorm.ALL_HEADS)
