"""Rotary settings from config.json.

transformers 5 writes rope_parameters {rope_type, rope_theta, ...}. Earlier versions write
rope_theta and rope_scaling {rope_type or type, ...}. This module reads both
spellings. A file may have both if they agree.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from minisgl.core import ConfigError
from minisgl.layers.rotary import (
    LinearRope,
    Llama3Rope,
    LongRope,
    QueryScale,
    RopeScaling,
    YarnRope,
)
from minisgl.models.hf_config import HfConfig, HfRope, read_fields

_WHERE = "rope settings"
_ROPES = MappingProxyType(
    {"linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope, "longrope": LongRope}
)


class RopeSettings(NamedTuple):
    """The rotary settings of config.json.

    fraction      the fraction of each head that rotates.
    max_position  the context length in tokens.
    """

    theta: float
    scaling: RopeScaling | None
    fraction: float
    query_scale: QueryScale | None
    max_position: int


def ropes_from(config: HfConfig, plain_in_windows: bool) -> tuple[RopeSettings, RopeSettings]:
    """Read the rotary settings of the layers with full attention, and of those with a window.

    plain_in_windows: as Family.plain_window_rope. transformers 5 writes the settings of both kinds
    of layers into rope_parameters, by their names in layer_types. Raises ConfigError.
    """
    new = config.rope_parameters
    kinds = [new.get(kind) for kind in ("full_attention", "sliding_attention")]
    if any(isinstance(kind, Mapping) for kind in kinds):
        full, window = (
            rope_from(msgspec.structs.replace(config, rope_parameters=kind or {}, rope_scaling={}))
            for kind in kinds
        )
        return full, window
    full = rope_from(config)
    if not plain_in_windows:
        return full, full
    theta = config.rope_local_base_freq or full.theta
    plain = msgspec.structs.replace(config, rope_parameters={}, rope_scaling={}, rope_theta=theta)
    return full, rope_from(plain)


def rope_from(config: HfConfig) -> RopeSettings:
    """Read the rotary settings. Raises ConfigError.

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
        raise ConfigError(
            "rope settings by layer type are supported for full_attention and sliding_attention"
        )
    rope = read_fields(values, HfRope, _WHERE)
    fraction = rope.partial_rotary_factor
    if fraction == 1.0:
        fraction = config.partial_rotary_factor
    if not 0 < fraction <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, not {fraction:g}")
    theta = config.rope_theta if rope.rope_theta is None else rope.rope_theta
    if theta <= 1:
        raise ConfigError(f"rope_theta must be above 1, not {theta}")
    max_position = config.max_position_embeddings
    scaling = _scaling(values, rope, config)
    query_scale = None
    if rope.llama_4_scaling_beta:
        original = rope.original_max_position_embeddings or max_position
        query_scale = QueryScale(rope.llama_4_scaling_beta, original)
    if isinstance(scaling, YarnRope) and rope.original_max_position_embeddings is not None:
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    return RopeSettings(theta, scaling, fraction, query_scale, max_position)


def _scaling(values: dict[str, Any], rope: HfRope, config: HfConfig) -> RopeScaling | None:
    """Convert the settings to the class of their rope type.

    values: the JSON object from which `rope` was read.
    """
    kind = str(values.get("rope_type") or values["type"] or "default")
    max_position = config.max_position_embeddings
    if kind == "default":
        return None
    if kind not in _ROPES:
        supported = ", ".join(["default", *_ROPES])
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {supported}")
    original = rope.original_max_position_embeddings or max_position
    if kind == "longrope":
        original = config.original_max_position_embeddings or original
    values = values | {"original_max_position": original}
    if kind == "yarn":
        values["factor"] = factor = rope.factor or max_position / original
        if values.get("attention_factor") is None:
            values["attention_factor"] = _attention_factor(factor, rope)
    if kind == "longrope" and values.get("attention_factor") is None:
        if original == 1:
            raise ConfigError("longrope: original_max_position_embeddings must be above 1")
        factor = max(rope.factor or max_position / original, 1.0)
        values["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original))
    return read_fields(values, _ROPES[kind], _WHERE)


def _attention_factor(factor: float, rope: HfRope) -> float:
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, scale: float) -> float:
    """The factor on cosines and sines that sharpens attention: YaRN's 0.1 ln(s) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
