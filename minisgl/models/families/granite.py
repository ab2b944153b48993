"""Granite 3: as Llama, with factors of embedding, queries, blocks and logits."""

import math

import msgspec

from minisgl.models.families import llama
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec, Multipliers


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return msgspec.structs.replace(llama.spec(config, raw), multipliers=multipliers(config))


def multipliers(config: HfConfig) -> Multipliers:
    """Return the factors of config.json. Raises ConfigError."""
    query = 1.0
    if config.attention_multiplier is not None:
        query = config.attention_multiplier * math.sqrt(config.width_of_heads)
    return Multipliers(
        config.embedding_multiplier, query, config.residual_multiplier, config.logits_scaling
    )
