"""Qwen2, Qwen2.5 and Qwen2-MoE: q, k and v have a bias, without a field in config.json."""

from minisgl.models.compose import sparse_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return transformer(config, windows_if_enabled(config), qkv_bias=True)


def moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    mlps = sparse_layers(config, raw, shared=True)
    return transformer(config, windows_if_enabled(config), mlps, qkv_bias=True)
