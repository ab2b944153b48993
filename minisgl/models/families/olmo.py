"""OLMo 2 and 3: norms after the blocks, and a norm over all query and key heads."""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import (
    attention_layers,
    dense_layers,
    model_spec,
    windows_by_interval,
    windows_if_enabled,
)
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import RopeSettings, rope_of
from minisgl.models.spec import ModelSpec, NormsSpec

DEFAULTS_3: Mapping[str, Any] = {"sliding_window": 4096, "rope_theta": 5e5}


def spec_2(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    return _spec(config, rope_of(config), windows_if_enabled(config, config.max_window_layers))


def spec_3(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    return _spec(config, rope_of(config, plain_windows=True), windows_by_interval(config, 4))


def _spec(config: HfConfig, rope: RopeSettings, windows: Sequence[int | None]) -> ModelSpec:
    bias = config.attention_bias
    mixers = attention_layers(
        config,
        windows,
        rope.of(windows),
        qk_norm=QkNorm.ALL_HEADS,
        qkv_bias=bias,
        output_bias=bias,
    )
    norms = NormsSpec(before=False, after=True)
    return model_spec(config, rope, mixers, dense_layers(config), norms=norms)
