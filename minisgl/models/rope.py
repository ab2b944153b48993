"""Rotary settings from either spelling of config.json.

transformers 5 writes rope_parameters {rope_type, rope_theta, ...}; earlier versions wrote
rope_theta and rope_scaling {rope_type or type, ...}.
"""

import math
from collections.abc import Mapping

from minisgl.core import ConfigError
from minisgl.layers import LinearRope, Llama3Rope, RopeScaling, YarnRope
from minisgl.models.fields import Fields

_SUPPORTED = "default, linear, llama3, yarn"


def rope_from(config: Fields) -> tuple[float, RopeScaling | None, int]:
    """Theta, scaling, context length in tokens. Raises ConfigError that names what is wrong.

    A YaRN model that names its original context goes to `factor` times that, even where
    max_position_embeddings was left at the original (as Qwen's instructions do).
    """
    old, new = config.mapping("rope_scaling"), config.mapping("rope_parameters")
    values = {**old, "type": new.get("rope_type", old.get("type")), **new}
    if any(values[key] != value for key, value in old.items()):
        raise ConfigError("rope_scaling and rope_parameters in config.json disagree: drop one")
    if any(isinstance(value, Mapping) for value in values.values()):
        raise ConfigError("rope settings per layer type are not supported")
    fields = Fields(values, "rope settings")
    if any(place.number("partial_rotary_factor", 1.0) != 1.0 for place in (config, fields)):
        raise ConfigError("partial_rotary_factor other than 1 is not supported")
    theta = fields.number("rope_theta", config.number("rope_theta", 10000.0))
    if theta <= 1:
        raise ConfigError(f"rope_theta must be above 1, not {theta}")
    max_position = config.integer("max_position_embeddings")
    scaling = _scaling(fields, max_position)
    if isinstance(scaling, YarnRope) and fields.get("original_max_position_embeddings") is not None:
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    return theta, scaling, max_position


def _scaling(fields: Fields, max_position: int) -> RopeScaling | None:
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRope(fields.positive("factor"))
    if kind == "llama3":
        return Llama3Rope(
            factor=fields.positive("factor"),
            low_freq_factor=fields.positive("low_freq_factor"),
            high_freq_factor=fields.positive("high_freq_factor"),
            original_max_position=fields.integer("original_max_position_embeddings", max_position),
        )
    if kind == "yarn":
        return _yarn(fields, max_position)
    raise ConfigError(f"rope type {kind!r} is not supported; supported: {_SUPPORTED}")


def _yarn(fields: Fields, max_position: int) -> YarnRope:
    original = fields.integer("original_max_position_embeddings", max_position)
    factor = fields.positive("factor", max_position / original)
    mscale, mscale_all_dim = fields.number("mscale", 0.0), fields.number("mscale_all_dim", 0.0)
    attention_factor = _mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return YarnRope(
        factor=factor,
        attention_factor=fields.positive("attention_factor", attention_factor),
        original_max_position=original,
        beta_fast=fields.positive("beta_fast", 32.0),
        beta_slow=fields.positive("beta_slow", 1.0),
        truncate=fields.boolean("truncate", True),
    )


def _mscale(factor: float, scale: float) -> float:
    """How much longer contexts sharpen attention: YaRN's 0.1 ln(s) + 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
