"""Seed-OSS: as Llama, with a separate field for the bias of the attention output."""

from minisgl.models.compose import dense_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    qkv, output = config.attention_bias, config.attention_out_bias
    output = qkv if output is None else output
    mlps = dense_layers(config, bias=config.mlp_bias)
    return transformer(config, windows_if_enabled(config), mlps, qkv_bias=qkv, output_bias=output)
