"""Phi-3 and Phi-4: a part of each head rotates, and tensors are merged."""

from minisgl.models.compose import dense_layers, transformer, windows_everywhere
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, rope = windows_everywhere(config), rope_of(config, partial=True)
    return transformer(config, windows, dense_layers(config, merged=True), rope=rope, merged=True)
