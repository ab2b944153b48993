"""The supported architectures. All run the same decoder. A Family lists the differences."""

from collections.abc import Mapping
from dataclasses import dataclass

from minisgl.core import ConfigError


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of an architecture that its config.json does not state.

    qk_norm               Queries and keys are normalised per head before the rotation.
    always_qkv_bias       q, k and v have a bias, without a field in config.json.
    reads_attention_bias  attention_bias adds a bias to q, k, v and the output.
    reads_mlp_bias        mlp_bias adds a bias to the MLP.
    default_window        The sliding_window for a config.json that lacks the field. A null in
                          config.json means no window. With a default, layers have the window even
                          if use_sliding_window is false.
    window_skips_layers   The first max_window_layers layers have no window.
    moe                   The MLP of sparse layers is a mixture of experts.
    """

    qk_norm: bool = False
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    default_window: int | None = None
    window_skips_layers: bool = True
    moe: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(default_window=4096),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True),
    "Qwen3ForCausalLM": Family(qk_norm=True, reads_attention_bias=True),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=True, reads_attention_bias=True, window_skips_layers=False, moe=True
    ),
}


def family_of(architectures: object) -> Family:
    """Return the family of the first architecture in config.json.

    Raises ConfigError that lists the supported architectures.
    """
    supported = ", ".join(FAMILIES)
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"config.json names no architecture; supported: {supported}")
    name = str(architectures[0])
    if name not in FAMILIES:
        raise ConfigError(f"architecture {name} is not supported; supported: {supported}")
    return FAMILIES[name]
