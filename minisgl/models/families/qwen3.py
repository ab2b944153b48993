"""Qwen3 and Qwen3-MoE: a norm of each query and key head."""

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import sparse_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, bias = windows_if_enabled(config), config.attention_bias
    return transformer(config, windows, qk_norm=QkNorm.PER_HEAD, bias=bias)


def moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, mlps = windows_if_enabled(config, first=0), sparse_layers(config, raw)
    bias = config.attention_bias
    return transformer(config, windows, mlps, qk_norm=QkNorm.PER_HEAD, bias=bias)
