"""Llama."""

from minisgl.models.compose import dense_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    mlps = dense_layers(config, bias=config.mlp_bias)
    return transformer(config, windows_if_enabled(config), mlps, bias=config.attention_bias)
