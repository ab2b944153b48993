"""Rotary settings from config.json.

transformers 5 writes rope_parameters {rope_type, rope_theta, ...}. Earlier versions write
rope_theta and rope_scaling {rope_type or type, ...}. This module reads both
spellings. A file may have both if they agree.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minisgl.core import ConfigError
from minisgl.layers.rotary import LinearRope, Llama3Rope, RopeScaling, YarnRope
from minisgl.models.hf_config import HfConfig, HfRope, read_fields

_WHERE = "rope settings"
_ROPES = MappingProxyType({"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope})


def rope_from(config: HfConfig) -> tuple[float, RopeScaling | None, int]:
    """Return theta, the scaling, and the context length in tokens. Raises ConfigError.

    A YaRN model that names its original context has `factor` times that context, even if
    max_position_embeddings still holds the original context. Qwen's instructions for YaRN do not
    change that field.
    """
    old, new = config.rope_scaling, config.rope_parameters
    values = {**old, "type": new.get("rope_type", old.get("type")), **new}
    if any(values[key] != value for key, value in old.items()):
        raise ConfigError(
            "rope_scaling and rope_parameters in config.json disagree; remove one of them"
        )
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("rope settings per layer type are not supported")
    rope = read_fields(values, HfRope, _WHERE)
    if config.partial_rotary_factor != 1.0 or rope.partial_rotary_factor != 1.0:
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    theta = config.rope_theta if rope.rope_theta is None else rope.rope_theta
    if theta <= 1:
        raise ConfigError(f"rope_theta must be above 1, not {theta}")
    max_position = config.max_position_embeddings
    scaling = _scaling(values, rope, max_position)
    if isinstance(scaling, YarnRope) and rope.original_max_position_embeddings is not None:
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    return theta, scaling, max_position


def _scaling(values: dict[str, Any], rope: HfRope, max_position: int) -> RopeScaling | None:
    """Convert the settings to the class of their rope type.

    values: the JSON object from which `rope` was read.
    """
    kind = str(values.get("rope_type") or values["type"] or "default")
    if kind == "default":
        return None
    if kind not in _ROPES:
        supported = ", ".join(["default", *_ROPES])
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {supported}")
    original = rope.original_max_position_embeddings or max_position
    values = values | {"original_max_position": original}
    if kind == "yarn":
        values["factor"] = factor = rope.factor or max_position / original
        if values.get("attention_factor") is None:
            values["attention_factor"] = _attention_factor(factor, rope)
    return read_fields(values, _ROPES[kind], _WHERE)


def _attention_factor(factor: float, rope: HfRope) -> float:
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    """The factor on cosines and sines that sharpens attention: YaRN's 0.1 ln(s) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
