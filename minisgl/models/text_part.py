"""The config of the language model in a checkpoint with an image encoder. Loads without torch."""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.core import ConfigError

# Architectures with an image encoder: the architecture of the language model inside, by the
# model_type of text_config.
TEXT_PARTS: Mapping[str, Mapping[str, str]] = {
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
    },
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "MuseGlimmerForConditionalGeneration": {"muse_glimmer_text": "MuseGlimmerTextModel"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3VLTextModel"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3VLMoeTextModel"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}

# Prefixes of the language model beside an image encoder, in the old and the new spelling of
# transformers, with the prefix of the same tensors in a checkpoint without an encoder.
TEXT_PREFIXES = (("language_model.model.", "model."), ("model.language_model.", "model."))


def text_name(name: str) -> str:
    """Return the name of a tensor or module in a checkpoint without an image encoder."""
    return renamed(name, TEXT_PREFIXES)


def renamed(name: str, prefixes: Sequence[tuple[str, str]]) -> str:
    """Return `name` with the first of the prefixes that it has replaced by the new one."""
    found = (new + name.removeprefix(old) for old, new in prefixes if name.startswith(old))
    return next(found, name)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the language model in a config.json with an image encoder.

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
