"""The supported architectures. All run the same decoder. A Family lists the differences."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from minisgl.core import ConfigError


class QkNorm(Enum):
    """The RMSNorm of queries and keys before the rotation."""

    PER_HEAD = auto()
    ALL_HEADS = auto()  # over the heads of all ranks together


class Norms(Enum):
    """The norms of the stream at each block of a layer."""

    BEFORE = auto()  # of the input of the block
    AFTER = auto()  # of the output of the block, before it joins the residual stream
    BOTH = auto()


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of an architecture that its config.json does not state.

    qk_norm               The norm of queries and keys, or None.
    norms                 The norms before and after each block.
    offset_norms          A norm multiplies by 1 + weight.
    always_qkv_bias       q, k and v have a bias, without a field in config.json.
    reads_attention_bias  attention_bias adds a bias to q, k, v and the output.
    reads_mlp_bias        mlp_bias adds a bias to the MLP.
    defaults              The values of fields that config.json lacks. A null in config.json stays:
                          sliding_window null means no window.
    has_window            All layers have sliding_window, even if use_sliding_window is false.
    full_interval         Each layer whose number is a multiple of this has full attention, and the
                          others have a window, unless config.json says otherwise. 0: no such rule.
    window_skips_layers   The first max_window_layers layers have no window.
    sinks                 Each query head has an attention sink.
    moe                   Layers may be sparse: their MLP is a mixture of experts.
    stacked_experts       The experts are those of gpt-oss: one tensor for each matrix of all
                          experts, gate and up interleaved, biases, and a clamped SwiGLU.
    shared_expert         Sparse layers also have an expert that computes every token.
    partial_rotary        A fraction of each head may rotate (partial_rotary_factor).
    merged_linears        The checkpoint stores q, k and v as one tensor, and gate and up as one.
    no_rope_interval      Layers may lack a rotary embedding: those of no_rope_layers, or else each
                          layer whose number is a multiple of no_rope_layer_interval.
    rope_in_windows_only  If the model has windows, layers without one lack a rotary embedding.
    plain_window_rope     Layers with a window have a rotary embedding without scaling. Its base is
                          rope_local_base_freq if config.json has that field.
    multipliers           The config has factors of embedding, attention, residual and logits.
    scaled_embedding      The embedding is multiplied by the square root of the hidden size.
    end_tokens            Special tokens that end an answer, also of a model folder without
                          generation_config.json.
    """

    qk_norm: QkNorm | None = None
    norms: Norms = Norms.BEFORE
    offset_norms: bool = False
    always_qkv_bias: bool = False
    reads_attention_bias: bool = False
    reads_mlp_bias: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    has_window: bool = False
    full_interval: int = 0
    window_skips_layers: bool = True
    sinks: bool = False
    moe: bool = False
    stacked_experts: bool = False
    shared_expert: bool = False
    partial_rotary: bool = False
    merged_linears: bool = False
    no_rope_interval: bool = False
    rope_in_windows_only: bool = False
    plain_window_rope: bool = False
    multipliers: bool = False
    scaled_embedding: bool = False
    end_tokens: tuple[str, ...] = ()


_GEMMA = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "MistralForCausalLM": Family(defaults={"sliding_window": 4096}, has_window=True),
    "Ministral3ForCausalLM": Family(has_window=True),
    "Qwen2ForCausalLM": Family(always_qkv_bias=True),
    "Qwen2MoeForCausalLM": Family(always_qkv_bias=True, moe=True, shared_expert=True),
    "Qwen3ForCausalLM": Family(qk_norm=QkNorm.PER_HEAD, reads_attention_bias=True),
    "Qwen3MoeForCausalLM": Family(
        qk_norm=QkNorm.PER_HEAD,
        reads_attention_bias=True,
        window_skips_layers=False,
        moe=True,
    ),
    "Phi3ForCausalLM": Family(has_window=True, partial_rotary=True, merged_linears=True),
    "GraniteForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True, multipliers=True),
    "SmolLM3ForCausalLM": Family(
        reads_attention_bias=True, reads_mlp_bias=True, no_rope_interval=True
    ),
    "SeedOssForCausalLM": Family(reads_attention_bias=True, reads_mlp_bias=True),
    "Olmo2ForCausalLM": Family(
        qk_norm=QkNorm.ALL_HEADS, norms=Norms.AFTER, reads_attention_bias=True
    ),
    "Olmo3ForCausalLM": Family(
        qk_norm=QkNorm.ALL_HEADS,
        norms=Norms.AFTER,
        reads_attention_bias=True,
        defaults={"sliding_window": 4096, "rope_theta": 5e5},
        full_interval=4,
        plain_window_rope=True,
    ),
    "Exaone4ForCausalLM": Family(
        qk_norm=QkNorm.PER_HEAD, norms=Norms.AFTER, rope_in_windows_only=True
    ),
    "Gemma2ForCausalLM": Family(
        norms=Norms.BOTH,
        offset_norms=True,
        reads_attention_bias=True,
        defaults=_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        full_interval=2,
        scaled_embedding=True,
    ),
    "Gemma3ForCausalLM": Family(
        qk_norm=QkNorm.PER_HEAD,
        norms=Norms.BOTH,
        offset_norms=True,
        reads_attention_bias=True,
        defaults=_GEMMA3,
        full_interval=6,
        plain_window_rope=True,
        scaled_embedding=True,
    ),
    "GptOssForCausalLM": Family(
        reads_attention_bias=True,
        defaults={
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "torch_dtype": "bfloat16",  # of the published tensors that are not MXFP4
        },
        full_interval=2,
        sinks=True,
        moe=True,
        stacked_experts=True,
        end_tokens=("<|return|>", "<|call|>"),
    ),
}

# Architectures with a vision encoder: the architecture of the language model inside, by the
# model_type of text_config.
TEXT_PARTS: Mapping[str, Mapping[str, str]] = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
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
    # null in text_config means that the setting is not given, if the outer config gives it.
    given = {key: v for key, v in text.items() if v is not None or config.get(key) is None}
    return {**config, **given, "architectures": [TEXT_PARTS[name][kind]]}


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
