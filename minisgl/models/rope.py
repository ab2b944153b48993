"""Rotary settings from config.json.

transformers 5 writes rope_parameters {rope_type, rope_theta, ...}. Earlier versions write
rope_theta and rope_scaling {rope_type or type, ...}. This module reads both
spellings. A file may have both if they agree.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from minisgl.core import ConfigError
from minisgl.layers.rotary import (
    LinearRope,
    Llama3Rope,
    LongRope,
    ProportionalRope,
    QueryScale,
    Rope,
    RopeScaling,
    YarnRope,
)
from minisgl.models.hf_config import HfConfig, HfRope, check_supported, read_fields

_WHERE = "rope settings"
_ROPES: Mapping[str, type[RopeScaling]] = MappingProxyType(
    {
        "linear": LinearRope,
        "llama3": Llama3Rope,
        "yarn": YarnRope,
        "longrope": LongRope,
        "proportional": ProportionalRope,
    }
)


class RopeSettings(NamedTuple):
    """The rotary settings of config.json.

    rope, window: the embeddings of layers with full attention, and of layers with a window.
    max_position: the context length in tokens.
    """

    rope: Rope
    query_scale: QueryScale | None
    max_position: int
    window: Rope

    @property
    def none(self) -> Rope:
        """The embedding of layers that rotate nothing."""
        return Rope(self.rope.theta, None, 0)

    def of(self, windows: Sequence[int | None]) -> list[Rope]:
        """Return the embedding of each layer. windows: as compose.attention_layers takes them."""
        return [self.rope if size is None else self.window for size in windows]


def rope_of(
    config: HfConfig, *, partial: bool = False, plain_windows: bool = False
) -> RopeSettings:
    """Read the rotary settings of the layers with full attention, and of those with a window.

    transformers 5 writes the settings of both kinds of layers into rope_parameters, by their names
    in layer_types.

    partial: a fraction of each head may rotate (partial_rotary_factor). plain_windows: layers with
    a window have an embedding without scaling. Its base is rope_local_base_freq if config.json has
    that field. Raises ConfigError.
    """

    def read(**changes: Any) -> RopeSettings:
        return _read(msgspec.structs.replace(config, **changes), partial)

    new = config.rope_parameters
    kinds = [new.get(kind) for kind in ("full_attention", "sliding_attention")]
    if any(isinstance(kind, Mapping) for kind in kinds):
        full, window = (read(rope_parameters=kind or {}, rope_scaling={}) for kind in kinds)
        return full._replace(window=window.rope)
    full = read()
    if not plain_windows:
        return full
    theta = config.rope_local_base_freq or full.rope.theta
    plain = read(rope_parameters={}, rope_scaling={}, rope_theta=theta)
    return full._replace(window=plain.rope)


def _read(config: HfConfig, partial: bool) -> RopeSettings:
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
    scaling = _scaling(values, rope, config)
    if isinstance(scaling, ProportionalRope):
        fraction = 1.0  # the scaling has the part that turns
    elif fraction == 1.0:
        fraction = config.partial_rotary_factor
    if not 0 < fraction <= 1:
        raise ConfigError(f"partial_rotary_factor must be above 0 and at most 1, not {fraction:g}")
    if fraction != 1.0 and not partial:
        raise ConfigError("partial_rotary_factor other than 1 is not supported for this family")
    rotary_dim = int(config.width_of_heads * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise ConfigError(f"{rotary_dim} rotary elements of a head are not pairs")
    theta = config.rope_theta if rope.rope_theta is None else rope.rope_theta
    if theta <= 1:
        raise ConfigError(f"rope_theta must be above 1, not {theta}")
    max_position = config.max_position_embeddings
    if isinstance(scaling, LongRope):
        for factors in (scaling.short_factor, scaling.long_factor):
            if len(factors) != rotary_dim // 2:
                raise ConfigError(
                    f"longrope has {len(factors)} factors; expected {rotary_dim // 2}, one for "
                    "each pair of rotary elements"
                )
    query_scale = None
    if rope.llama_4_scaling_beta:
        original = rope.original_max_position_embeddings or max_position
        query_scale = QueryScale(rope.llama_4_scaling_beta, original)
    if isinstance(scaling, YarnRope) and rope.original_max_position_embeddings is not None:
        max_position = max(max_position, int(scaling.original_max_position * scaling.factor))
    turned = Rope(theta, scaling, rotary_dim)
    return RopeSettings(turned, query_scale, max_position, window=turned)


def _scaling(values: dict[str, Any], rope: HfRope, config: HfConfig) -> RopeScaling | None:
    """Convert the settings to the class of their rope type.

    values: the JSON object from which `rope` was read.
    """
    kind = str(values.get("rope_type") or values["type"] or "default")
    max_position = config.max_position_embeddings
    if kind == "default":
        return None
    check_supported("rope type", kind, ["default", *_ROPES])
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
    """YaRN's factor on cosines and sines, which sharpens attention: 0.1 ln(factor) + 1."""
    log = math.log(max(factor, 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * log + 1.0) / (0.1 * rope.mscale_all_dim * log + 1.0)
    return 0.1 * log + 1.0
