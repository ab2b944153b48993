"""Seed-OSS: as Llama, with a separate field for the bias of the attention output."""

from collections.abc import Mapping
from typing import Any

from minisgl.models.compose import (
    attention_layers,
    dense_layers,
    model_spec,
    windows_if_enabled,
)
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope, bias, output = rope_of(config), config.attention_bias, config.attention_out_bias
    windows = windows_if_enabled(config, config.max_window_layers)
    mixers = attention_layers(
        config,
        windows,
        rope.of(windows),
        qkv_bias=bias,
        output_bias=bias if output is None else output,
    )
    return model_spec(config, rope, mixers, dense_layers(config, bias=config.mlp_bias))
