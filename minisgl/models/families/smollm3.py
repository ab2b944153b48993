"""SmolLM3: as Llama, with layers without a rotary embedding."""

from collections.abc import Mapping
from typing import Any

from minisgl.core import ConfigError
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
    rope, bias = rope_of(config), config.attention_bias
    windows = windows_if_enabled(config, config.max_window_layers)
    chosen = zip(_rotates(config), rope.of(windows), strict=True)
    ropes = [one if rotates else rope.none for rotates, one in chosen]
    mixers = attention_layers(config, windows, ropes, qkv_bias=bias, output_bias=bias)
    return model_spec(config, rope, mixers, dense_layers(config, bias=config.mlp_bias))


def _rotates(config: HfConfig) -> list[bool]:
    """Whether each layer has a rotary embedding. Raises ConfigError.

    no_rope_layers has the answer, or else each layer whose number is a multiple of
    no_rope_layer_interval has none.
    """
    count, interval = config.num_layers, config.no_rope_layer_interval
    if not config.no_rope_layers:
        return [(layer + 1) % interval != 0 for layer in range(count)]
    if len(config.no_rope_layers) != count:
        raise ConfigError(
            f"no_rope_layers in config.json has {len(config.no_rope_layers)} entries; expected "
            f"{count}, one for each layer"
        )
    return [bool(value) for value in config.no_rope_layers]
