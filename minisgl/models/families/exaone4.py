"""EXAONE 4: norms after the blocks; beside windows, full layers rotate nothing."""

from collections.abc import Mapping
from typing import Any

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import (
    attention_layers,
    dense_layers,
    model_spec,
    windows_if_enabled,
)
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec, NormsSpec


def spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope = rope_of(config)
    windows = windows_if_enabled(config, config.max_window_layers)
    ropes = rope.of(windows)
    if config.sliding_window is not None:
        ropes = [rope.none if size is None else rope.window for size in windows]
    mixers = attention_layers(config, windows, ropes, qk_norm=QkNorm.PER_HEAD)
    norms = NormsSpec(before=False, after=True)
    return model_spec(config, rope, mixers, dense_layers(config), norms=norms)
