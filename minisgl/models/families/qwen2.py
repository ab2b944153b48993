"""Qwen2, Qwen2.5 and Qwen2-MoE: q, k and v have a bias, without a field in config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

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
    return _spec(config, dense_layers(config))


def moe_spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    return _spec(config, sparse_layers(config, raw, shared=True))


def _spec(config: HfConfig, mlps: Sequence[DenseSpec | ExpertsSpec]) -> ModelSpec:
    rope = rope_of(config)
    windows = windows_if_enabled(config, config.max_window_layers)
    mixers = attention_layers(config, windows, rope.of(windows), qkv_bias=True)
    return model_spec(config, rope, mixers, mlps)
