"""The supported architectures. All run the same decoder. A Family lists the differences."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from minisgl.core import ConfigError


class QkNorm(Enum):
    """The RMSNorm of queries and keys before the rotation."""

    PER_HEAD = auto()
    ALL_HEADS = auto()  # over the heads of all ranks together


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of an architecture that its config.json does not state.

    qk_norm               The norm of queries and keys, or None.
    norms_after           A norm follows each block, before its output joins the residual stream.
                          No norm precedes the block.
    always_qkv_bias       q, k and v have a bias, without a field in config.json.
    reads_attention_bias  attention_bias adds a bias to q, k, v and the output.
    reads_mlp_bias        mlp_bias adds a bias to the MLP.
    default_window        The sliding_window for a config.json that lacks the field. A null in
                          config.json means no window.
    has_window            All layers have sliding_window, even if use_sliding_window is false.
    window_skips_layers   The first max_window_layers layers have no window.
    moe                   The MLP of sparse layers is a mixture of experts.
    shared_expert         Sparse layers also have an expert that computes every token.
    partial_rotary        A fraction of each head may rotate (partial_rotary_factor).
    merged_linears        The checkpoint stores q, k and v as one tensor, and gate and up as one.
    no_rope_interval      Layers may lack a rotary embedding: those of no_rope_layers, or else each
                          layer whose number is a multiple of no_rope_layer_interval.
    rope_in_windows_only  If the model has windows, layers without one lack a rotary embedding.
    multipliers           The config has factors of embedding, attention, residual and logits.
    """

    qk_norm: QkNorm | None = None
    norms_after: bool = False
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    default_window: int | None = None
    has_window: bool = False
    window_skips_layers: bool = True
    moe: bool = False
    shared_expert: bool = False
    partial_rotary: bool = False
    merged_linears: bool = False
    no_rope_interval: bool = False
    rope_in_windows_only: bool = False
    multipliers: bool = False


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(default_window=4096, has_window=True),
    "Ministral3ForCausalLM": Family(has_window=True),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True),
    "Qwen2MoeForCausalLM": Family(always_qkv_bias=True, moe=True, shared_expert=True),
    "Qwen3ForCausalLM": Family(qk_norm=QkNorm.PER_HEAD, reads_attention_bias=True),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=QkNorm.PER_HEAD, reads_attention_bias=True, window_skips_layers=False, moe=True
    ),
    "Phi3ForCausalLM": Family(has_window=True, partial_rotary=True, merged_linears=True),
    "GraniteForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True, multipliers=True),
    "SmolLM3ForCausalLM": Family(
        reads_attention_bias=True, reads_mlp_bias=True, no_rope_interval=True
    ),
    "SeedOssForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "Olmo2ForCausalLM": Family(
        qk_norm=QkNorm.ALL_HEADS, norms_after=True, reads_attention_bias=True
    ),
    "Exaone4ForCausalLM": Family(
        qk_norm=QkNorm.PER_HEAD, norms_after=True, rope_in_windows_only=True
    ),
}

# Architectures with a vision encoder: the architecture of the language model inside, by the
# model_type of text_config.
TEXT_PARTS: Mapping[str, Mapping[str, str]] = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model in a config.json with a vision encoder.

    A setting outside of text_config, such as quantization_config, also applies to the language
    model, unless text_config has another value than null for it. Any other config is returned as it
    is. Raises ConfigError for an unknown language model.
    """
    text, architectures = config.get("text_config"), config.get("architectures")
    name = str(architectures[0]) if isinstance(architectures, list) and architectures else ""
    if name not in TEXT_PARTS or not isinstance(text, dict):
        return config
    kind = str(text.get("model_type"))
    if kind not in TEXT_PARTS[name]:
        known = ", ".join(TEXT_PARTS[name])
        raise ConfigError(
            f"{name} with the language model {kind!r} is not supported; known: {known}"
        )
    merged = {key: value for key, value in config.items() if key != "text_config"}
    # null in text_config means that the setting is not given, if the outer config gives it.
    merged |= {key: v for key, v in text.items() if v is not None or merged.get(key) is None}
    return {**merged, "architectures": [TEXT_PARTS[name][kind]]}


def family_of(architectures: object) -> Family:
    """Return the family of the first architecture in config.json.

    Raises ConfigError that lists the supported architectures.
    """
    supported = ", ".join([*FAMILIES, *TEXT_PARTS])
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"config.json names no architecture; supported: {supported}")
    name = str(architectures[0])
    if name not in FAMILIES:
        raise ConfigError(f"architecture {name} is not supported; supported: {supported}")
    return FAMILIES[name]
