"""Mistral and Ministral 3."""

from collections.abc import Mapping
from typing import Any

from minisgl.models.compose import (
    attention_layers,
    dense_layers,
    model_spec,
    windows_everywhere,
)
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec

# In a config.json of Mistral, null means no window.
DEFAULTS: Mapping[str, Any] = {"sliding_window": 4096}


def spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope, windows = rope_of(config), windows_everywhere(config)
    mixers = attention_layers(config, windows, rope.of(windows))
    return model_spec(config, rope, mixers, dense_layers(config))
