"""gpt-oss: windows in every other layer, attention sinks, and stacked experts."""

from collections.abc import Mapping
from typing import Any

from minisgl.models.compose import (
    attention_layers,
    model_spec,
    read_experts,
    windows_by_interval,
)
from minisgl.models.hf_config import HfConfig
from minisgl.models.rope import rope_of
from minisgl.models.spec import ModelSpec
from minisgl.moe.base import ClampedSwiglu
from minisgl.moe.spec import ExpertsSpec

DEFAULTS: Mapping[str, Any] = {
    "attention_bias": True,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "torch_dtype": "bfloat16",  # of the published tensors that are not MXFP4
}


def spec(config: HfConfig, raw: Mapping[str, Any]) -> ModelSpec:
    rope, windows, bias = rope_of(config), windows_by_interval(config, 2), config.attention_bias
    mixers = attention_layers(
        config, windows, rope.of(windows), sinks=True, qkv_bias=bias, output_bias=bias
    )
    fields = read_experts(raw)
    experts = ExpertsSpec(
        fields.num_experts,
        fields.num_experts_per_tok,
        config.intermediate_size,
        # A softmax over the chosen experts is a softmax over all, divided by the chosen sum.
        renormalise=True,
        stacked=True,
        swiglu=ClampedSwiglu(fields.swiglu_alpha, fields.swiglu_limit),
    )
    ends = ("<|return|>", "<|call|>")
    return model_spec(config, rope, mixers, [experts] * config.num_layers, end_texts=ends)
