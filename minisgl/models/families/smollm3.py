"""SmolLM3: as Llama, with layers without a rotary embedding."""

from minisgl.models.compose import check_per_layer, dense_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, rope = windows_if_enabled(config), rope_of(config)
    chosen = zip(_rotates(config), rope.of(windows), strict=True)
    ropes = [one if rotates else rope.none for rotates, one in chosen]
    mlps = dense_layers(config, bias=config.mlp_bias)
    return transformer(config, windows, mlps, ropes=ropes, bias=config.attention_bias)


def _rotates(config: HfConfig) -> list[bool]:
    """Whether each layer has a rotary embedding. Raises ConfigError.

    no_rope_layers has the answer, or else each layer whose number is a multiple of
    no_rope_layer_interval has none.
    """
    count, interval = config.num_layers, config.no_rope_layer_interval
    if not config.no_rope_layers:
        return [(layer + 1) % interval != 0 for layer in range(count)]
    check_per_layer(config, "no_rope_layers", config.no_rope_layers)
    return [bool(value) for value in config.no_rope_layers]
