"""The supported architectures: one decoder, each family's differences as data."""

from dataclasses import dataclass

from minisgl.core import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """What sets an architecture apart and does not stand in its config.json.

    qk_norm               queries and keys are normalised per head before rotation.
    always_qkv_bias       q, k and v have a bias whatever the config says.
    reads_attention_bias  attention_bias switches a bias on q, k, v and the output.
    reads_mlp_bias        mlp_bias switches a bias on the MLP.
    window_is_optional    use_sliding_window must be true for sliding_window to count.
    window_skips_layers   the first max_window_layers layers never slide.
    moe                   the MLP is a mixture of experts (in its sparse layers).
    """

    qk_norm: bool = False
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    window_is_optional: bool = True
    window_skips_layers: bool = True
    moe: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(window_is_optional=False),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, reads_attention_bias=True),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, reads_attention_bias=True, window_skips_layers=False, moe=True
    ),
}


def family_of(architectures: object) -> Family:
    """Of the first entry of config.json's `architectures`. Raises ConfigError listing all known."""
    supported = ", ".join(FAMILIES)
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"config.json names no architecture; supported: {supported}")
    name = str(architectures[0])
    if name not in FAMILIES:
        raise ConfigError(f"architecture {name} is not supported; supported: {supported}")
    return FAMILIES[name]
