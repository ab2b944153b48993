"""Reads the description of a model from the JSON files of a Hugging Face checkpoint.

A model with a setting that minisgl does not support and that would change the output is refused.
The error names the setting.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from minisgl.core.files import read_json
from minisgl.models.hf_config import HfConfig, HfGeneration, HfTokenizer, read_fields
from minisgl.models.registry import family_of
from minisgl.models.spec import ModelSpec
from minisgl.models.text_part import text_part

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_model_spec(folder: str) -> ModelSpec:
    """Read config.json and, if the folder has them, two other files. Raises ConfigError.

    generation_config.json: sampling defaults and end tokens; without it, tokenizer.json has the ids
    of ModelSpec.end_texts. hf_quant_config.json: quantisation by ModelOpt.
    """
    path = Path(folder)
    config = read_json(path / "config.json")
    modelopt = path / "hf_quant_config.json"
    if config.get("quantization_config") is None and modelopt.exists():
        settings = read_json(modelopt).get("quantization")
        settings = settings if isinstance(settings, dict) else {}
        config = {**config, "quantization_config": {"quant_method": "modelopt", **settings}}
    generation_path = path / "generation_config.json"
    if generation_path.exists():
        return model_spec_from(config, read_json(generation_path))
    spec, tokenizer = model_spec_from(config), path / "tokenizer.json"
    if not spec.end_texts or not tokenizer.exists():
        return spec
    added = read_fields(read_json(tokenizer), HfTokenizer, tokenizer.name)
    return model_spec_from(config, {"eos_token_id": added.ids_of(spec.end_texts)})


def model_spec_from(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelSpec:
    """Check and complete the two JSON objects. Raises ConfigError that names the wrong field."""
    config = text_part(config)
    family = family_of(config.get("architectures"))
    config = {**family.defaults, **config}
    spec = family.spec(read_fields(config, HfConfig, "config.json"), config)
    recommended = read_fields(generation or {}, HfGeneration, "generation_config.json")
    return msgspec.structs.replace(
        spec,
        eos_token_ids=_eos_token_ids(spec, recommended),
        sampling_defaults=_sampling_defaults(recommended),
    )


def _sampling_defaults(recommended: HfGeneration) -> dict[str, int | float]:
    """Return the parameters that the model's author recommends for requests without them.

    do_sample false means greedy decoding, which is temperature 0.
    """
    values = {name: getattr(recommended, name) for name in _SAMPLING}
    found: dict[str, int | float] = {name: x for name, x in values.items() if x is not None}
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return found | ({"temperature": 0.0} if recommended.do_sample is False else {})


def _eos_token_ids(spec: ModelSpec, generation: HfGeneration) -> tuple[int, ...]:
    """The end-of-sequence ids of both files, sorted.

    An id outside of the vocabulary is left out, because the sampler never returns it.
    """
    ends = generation.eos_token_id
    found = {*spec.eos_token_ids, *(ends if isinstance(ends, list) else [ends])}
    return tuple(sorted(item for item in found if 0 <= item < spec.vocab_size))
