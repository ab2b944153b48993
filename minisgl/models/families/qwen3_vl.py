"""Qwen3-VL: Qwen3 with an image encoder, whose features also enter the first layers."""

import msgspec

from minisgl.core import ConfigError
from minisgl.models.compose import sparse_layers
from minisgl.models.encoder_spec import encoder_spec_of
from minisgl.models.families import qwen3
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec

DEFAULTS: Raw = {"rope_theta": 5e5}


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return _with_images(qwen3.spec(config, raw), raw)


def moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    # The router always normalises. norm_topk_prob in config.json has no effect.
    mlps = sparse_layers(config, {**raw, "norm_topk_prob": True})
    return _with_images(qwen3.with_experts(config, mlps), raw)


def _with_images(model: ModelSpec, raw: Raw) -> ModelSpec:
    """Return the model with the encoder of config.json, if it has one. Raises ConfigError.

    The first layer after layer 0 gets the features of the first tap, and so on.
    """
    encoder = encoder_spec_of(raw, model.hidden_size, (24, 20, 20), deepstack=True)
    taps = 0 if encoder is None else len(encoder.taps)
    if taps >= model.num_layers:
        raise ConfigError(
            f"vision_config: deepstack_visual_indexes has {taps} blocks; expected fewer than the "
            f"{model.num_layers} layers of the language model"
        )
    layers = [
        layer._replace(tap=number if 1 <= number <= taps else None)
        for number, layer in enumerate(model.layers)
    ]
    return msgspec.structs.replace(model, encoder=encoder, layers=tuple(layers))
