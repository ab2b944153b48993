"""Phi-3 and Phi-4: a part of each head rotates, and tensors are merged."""

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


def spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope, windows = rope_of(config, partial=True), windows_everywhere(config)
    mixers = attention_layers(config, windows, rope.of(windows), merged=True)
    return model_spec(config, rope, mixers, dense_layers(config, merged=True))
