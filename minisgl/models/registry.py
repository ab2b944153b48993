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
    default_window        where there is one, it stands for an absent sliding_window (null: none),
                          and layers slide without a use_sliding_window that is true.
    window_skips_layers   the first max_window_layers layers never slide.
    moe                   the MLP is a mixture of experts (in its sparse layers).
    """

    qk_norm: bool = False
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    default_window: int | None = None
    window_skips_layers: bool = True
    moe: bool = False


FAMILIES = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(default_window=4096),
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
