"""Qwen3.5 and 3.6: as Qwen3-Next, with separate projections of the gated delta nets, and images."""

from collections.abc import Sequence

import msgspec

from minisgl.layers.mlp import DenseSpec
from minisgl.models.compose import dense_layers, sparse_layers
from minisgl.models.encoder_spec import encoder_spec_of
from minisgl.models.families.qwen3_next import hybrid_spec
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec

DEFAULTS: Raw = {"head_dim": 256, "partial_rotary_factor": 0.25}
MOE_DEFAULTS: Raw = {
    **DEFAULTS,
    "intermediate_size": 512,  # of no layer: all have experts
    "num_experts": 256,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return _with_images(config, raw, dense_layers(config))


def moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    # The router always normalises, and config.json has no field for it.
    mlps = sparse_layers(config, {**raw, "norm_topk_prob": True}, shared=True)
    return _with_images(config, raw, mlps)


def _with_images(config: HfConfig, raw: Raw, mlps: Sequence[DenseSpec | ExpertsSpec]) -> ModelSpec:
    encoder = encoder_spec_of(raw, config.hidden_size, (11, 11, 10), deepstack=False)
    return msgspec.structs.replace(hybrid_spec(config, raw, mlps, grouped=False), encoder=encoder)
