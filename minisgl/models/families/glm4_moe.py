"""GLM-4.5 and later: experts chosen by sigmoids with a correction, and a shared expert.

A part of each head rotates. The draft head of a checkpoint is a further layer, and is not used.
"""

import msgspec

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import attention_layers, dense_layers, model_spec
from minisgl.models.hf_config import Count, HfConfig, PartCount, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertNames, ExpertsSpec

DEFAULTS: Raw = {"partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5}


class HfGlm4Moe(msgspec.Struct, frozen=True):
    """The fields of config.json that only this family has.

    first_k_dense_replace: the number of dense layers, which are the first ones. n_group: groups of
    experts, of which the router would choose some first.
    """

    n_routed_experts: PartCount = 128
    n_shared_experts: PartCount = 1
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 1408
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: Count = 1
    first_k_dense_replace: int = 1
    use_qk_norm: bool = False


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields = read_fields(raw, HfGlm4Moe, "config.json")
    check_supported("n_group", fields.n_group, [1])
    experts = ExpertsSpec(
        fields.n_routed_experts,
        fields.num_experts_per_tok,
        fields.moe_intermediate_size,
        fields.norm_topk_prob,
        shared=fields.n_shared_experts,
        shared_gate=False,
        sigmoid=True,
        scale=fields.routed_scaling_factor,
        names=ExpertNames(shared="shared_experts"),
    )
    dense = dense_layers(config)[: fields.first_k_dense_replace]
    layers, rope = config.num_layers, rope_of(config, partial=True)
    qk_norm = QkNorm.PER_HEAD if fields.use_qk_norm else None
    attention = attention_layers(
        config,
        [None] * layers,
        [rope.rope] * layers,
        qk_norm=qk_norm,
        qkv_bias=config.attention_bias,
    )
    sparse = [experts] * (layers - len(dense))
    unread = (f"model.layers.{layers}.",)
    return model_spec(config, rope, attention, [*dense, *sparse], unread=unread)
