"""Gemma 2 and 3: norms before and after the blocks, and a factor on the embedding."""

import math
from typing import Any

import msgspec
import torch

from minisgl.layers.attention import QkNorm
from minisgl.models.compose import dtype_of, transformer, windows_by_interval
from minisgl.models.encoder_spec import siglip_names, siglip_spec_of
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec, Multipliers, NormsSpec

_DEFAULTS: Raw = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
DEFAULTS_2: Raw = {
    **_DEFAULTS,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
DEFAULTS_3: Raw = {
    **_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def spec_2(config: HfConfig, raw: Raw) -> ModelSpec:
    return _spec(config, windows_by_interval(config, 2))


def spec_3(config: HfConfig, raw: Raw) -> ModelSpec:
    rope, windows = rope_of(config, plain_windows=True), windows_by_interval(config, 6)
    model = _spec(config, windows, rope=rope, qk_norm=QkNorm.PER_HEAD)
    encoder = siglip_spec_of(raw, config.hidden_size, model.multipliers.embedding)
    if encoder is None:
        return model
    names, unread = siglip_names(encoder.depth), ("model.vision_tower.head.",)
    return msgspec.structs.replace(model, encoder=encoder, names=names, unread=unread)


def _spec(config: HfConfig, windows: list[int | None], **traits: Any) -> ModelSpec:
    norms, bias = NormsSpec(before=True, after=True, offset=True), config.attention_bias
    model = transformer(config, windows, norms=norms, norm_offset=True, bias=bias, **traits)
    return msgspec.structs.replace(model, multipliers=_multipliers(config))


def _multipliers(config: HfConfig) -> Multipliers:
    """The embedding is multiplied by the square root of the hidden size."""
    query, scalar = 1.0, config.query_pre_attn_scalar
    if scalar is not None:
        query = math.sqrt(config.width_of_heads / scalar)
    return Multipliers(embedding_factor(config.hidden_size, config), query)


def embedding_factor(width: int, config: HfConfig) -> float:
    """Return the square root of an embedding's width, as a number of the checkpoint's dtype.

    The authors' code rounds the factor.
    """
    return float(torch.tensor(width**0.5).to(getattr(torch, dtype_of(config))))
