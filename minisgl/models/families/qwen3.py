"""Qwen3, Qwen3-MoE and the text of Qwen3-VL: a norm of each query and key head.

The three rotary positions of Qwen3-VL are equal for a token of text.
"""

from minisgl.layers.attention import QkNorm
from minisgl.layers.mlp import DenseSpec
from minisgl.models.compose import sparse_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec

VL_DEFAULTS: Raw = {"rope_theta": 5e5}


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, bias = windows_if_enabled(config), config.attention_bias
    return transformer(config, windows, qk_norm=QkNorm.PER_HEAD, bias=bias)


def moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return _moe(config, sparse_layers(config, raw))


def vl_moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    # The router always normalises. norm_topk_prob in config.json has no effect.
    return _moe(config, sparse_layers(config, {**raw, "norm_topk_prob": True}))


def _moe(config: HfConfig, mlps: list[DenseSpec | ExpertsSpec]) -> ModelSpec:
    windows, bias = windows_if_enabled(config, first=0), config.attention_bias
    return transformer(config, windows, mlps, qk_norm=QkNorm.PER_HEAD, bias=bias)
