"""The supported architectures. All run the same decoder; a family describes its layers as specs."""

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from minisgl.core import ConfigError
from minisgl.models.families import (
    exaone4,
    gemma,
    gemma4,
    glm4_moe,
    gpt_oss,
    granite,
    granitemoehybrid,
    llama,
    minimax_m2,
    mistral,
    muse_glimmer,
    nemotron_h,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
    qwen3_vl,
    seed_oss,
    smollm3,
)
from minisgl.models.hf_config import HfConfig, Raw
from minisgl.models.spec import ModelSpec
from minisgl.models.text_part import TEXT_PARTS

_LIST = "docs/models.md lists the supported architectures"


class Family(NamedTuple):
    """How to read the config.json of an architecture.

    spec      builds the model from the fields that all families share and from the JSON object,
              both completed by `defaults`. Raises ConfigError.
    defaults  values of fields that config.json lacks. A null in config.json stays.
    """

    spec: Callable[[HfConfig, Raw], ModelSpec]
    defaults: Raw = MappingProxyType({})


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(llama.spec),
    "MistralForCausalLM": Family(mistral.spec, mistral.DEFAULTS),
    "Ministral3ForCausalLM": Family(mistral.spec),
    "Qwen2ForCausalLM": Family(qwen2.spec),
    "Qwen2MoeForCausalLM": Family(qwen2.moe_spec),
    "Qwen3ForCausalLM": Family(qwen3.spec),
    "Qwen3MoeForCausalLM": Family(qwen3.moe_spec),
    "Qwen3VLTextModel": Family(qwen3_vl.spec, qwen3_vl.DEFAULTS),
    "Qwen3VLMoeTextModel": Family(qwen3_vl.moe_spec, qwen3_vl.DEFAULTS),
    "Qwen3NextForCausalLM": Family(qwen3_next.spec, qwen3_next.DEFAULTS),
    "Qwen3_5ForCausalLM": Family(qwen3_5.spec, qwen3_5.DEFAULTS),
    "Qwen3_5MoeForCausalLM": Family(qwen3_5.moe_spec, qwen3_5.MOE_DEFAULTS),
    "Phi3ForCausalLM": Family(phi3.spec),
    "GraniteForCausalLM": Family(granite.spec),
    "GraniteMoeHybridForCausalLM": Family(granitemoehybrid.spec),
    "SmolLM3ForCausalLM": Family(smollm3.spec),
    "SeedOssForCausalLM": Family(seed_oss.spec),
    "Olmo2ForCausalLM": Family(olmo.spec_2),
    "Olmo3ForCausalLM": Family(olmo.spec_3, olmo.DEFAULTS_3),
    "Exaone4ForCausalLM": Family(exaone4.spec),
    "Gemma2ForCausalLM": Family(gemma.spec_2, gemma.DEFAULTS_2),
    "Gemma3ForCausalLM": Family(gemma.spec_3, gemma.DEFAULTS_3),
    "Gemma4ForCausalLM": Family(gemma4.spec, gemma4.DEFAULTS),
    "Gemma4UnifiedForCausalLM": Family(gemma4.spec, gemma4.UNIFIED_DEFAULTS),
    "Glm4MoeForCausalLM": Family(glm4_moe.spec, glm4_moe.DEFAULTS),
    "MiniMaxM2ForCausalLM": Family(minimax_m2.spec, minimax_m2.DEFAULTS),
    "MuseGlimmerTextModel": Family(muse_glimmer.spec, muse_glimmer.DEFAULTS),
    "NemotronHForCausalLM": Family(nemotron_h.spec, nemotron_h.DEFAULTS),
    "GptOssForCausalLM": Family(gpt_oss.spec, gpt_oss.DEFAULTS),
}


def family_of(architectures: object) -> Family:
    """Return the family of the first architecture in config.json.

    Raises ConfigError that names the nearest supported architecture, if one has a similar name.
    """
    if not isinstance(architectures, list) or not architectures:
        raise ConfigError(f"config.json names no architecture; {_LIST}")
    name = str(architectures[0])
    if name not in FAMILIES:
        raise ConfigError(f"architecture {name} is not supported{_nearest(name)}; {_LIST}")
    return FAMILIES[name]


def _nearest(name: str) -> str:
    """Return the supported architecture with the most similar name, as a part of a message.

    The names are compared without their endings, such as ForCausalLM, which most of them share.
    """
    stems = {known.partition("For")[0]: known for known in (*TEXT_PARTS, *FAMILIES)}
    found = difflib.get_close_matches(name[:64].partition("For")[0], stems, n=1)
    return f"; the nearest supported one is {stems[found[0]]}" if found else ""
