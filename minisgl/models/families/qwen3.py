"""Qwen3 and Qwen3-MoE: a norm of each query and key head."""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.layers.attention import QkNorm
from minisgl.layers.mlp import DenseSpec
from minisgl.models.compose import (
    attention_layers,
    dense_layers,
    model_spec,
    sparse_layers,
    windows_if_enabled,
)
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec


def spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    return _spec(config, dense_layers(config), config.max_window_layers)


def moe_spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    return _spec(config, sparse_layers(config, raw), 0)


def _spec(
    config: HfConfig, mlps: Sequence[DenseSpec | ExpertsSpec], first_window: float
) -> ModelSpec:
    rope, bias = rope_of(config), config.attention_bias
    windows = windows_if_enabled(config, first_window)
    mixers = attention_layers(
        config,
        windows,
        rope.of(windows),
        qk_norm=QkNorm.PER_HEAD,
        qkv_bias=bias,
        output_bias=bias,
    )
    return model_spec(config, rope, mixers, mlps)
