"""gpt-oss: windows in every other layer, attention sinks, and stacked experts."""

from minisgl.kernel.activation import ClampedSwiglu
from minisgl.models.compose import read_experts, transformer, windows_by_interval
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec
from minisgl.moe.spec import ExpertNames, ExpertsSpec

DEFAULTS: Raw = {
    "attention_bias": True,
    "sliding_window": 128,
    "rope_theta": 150000.0,
    "torch_dtype": "bfloat16",  # of the published tensors that are not MXFP4
}


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields, windows = read_experts(raw), windows_by_interval(config, 2)
    experts = ExpertsSpec(
        fields.num_experts,
        fields.num_experts_per_tok,
        config.intermediate_size,
        # A softmax over the chosen experts is a softmax over all, divided by the chosen sum.
        renormalise=True,
        stacked=True,
        activation=ClampedSwiglu(fields.swiglu_alpha, fields.swiglu_limit),
        names=ExpertNames(router="router"),
    )
    mlps, ends = [experts] * config.num_layers, ("<|return|>", "<|call|>")
    bias = config.attention_bias
    return transformer(config, windows, mlps, end_texts=ends, sinks=True, bias=bias)
