"""OLMo 2 and 3: norms after the blocks, and a norm over all query and key heads."""

from typing import Any

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import transformer, windows_by_interval, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec, NormsSpec

DEFAULTS_3: Raw = {"sliding_window": 4096, "rope_theta": 5e5}


def spec_2(config: HfConfig, raw: Raw) -> ModelSpec:
    return transformer(config, windows_if_enabled(config), **_traits(config))


def spec_3(config: HfConfig, raw: Raw) -> ModelSpec:
    rope = rope_of(config, plain_windows=True)
    return transformer(config, windows_by_interval(config, 4), rope=rope, **_traits(config))


def _traits(config: HfConfig) -> dict[str, Any]:
    norms = NormsSpec(before=False, after=True)
    return {"norms": norms, "qk_norm": QkNorm.ALL_HEADS, "bias": config.attention_bias}
