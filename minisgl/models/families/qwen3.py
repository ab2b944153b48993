"""Qwen3 and Qwen3-MoE: a norm of each query and key head."""

from minisgl.layers.attention import QkNorm
from minisgl.layers.mlp import DenseSpec
from minisgl.models.compose import sparse_layers, transformer, windows_if_enabled
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertsSpec


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    windows, bias = windows_if_enabled(config), config.attention_bias
    return transformer(config, windows, qk_norm=QkNorm.PER_HEAD, bias=bias)


def moe_spec(config: HfConfig, raw: Raw) -> ModelSpec:
    return with_experts(config, sparse_layers(config, raw))


def with_experts(config: HfConfig, mlps: list[DenseSpec | ExpertsSpec]) -> ModelSpec:
    """Return a Qwen3 with these MLPs."""
    windows, bias = windows_if_enabled(config, first=0), config.attention_bias
    return transformer(config, windows, mlps, qk_norm=QkNorm.PER_HEAD, bias=bias)
