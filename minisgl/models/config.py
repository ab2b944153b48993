"""Reads the description of a model from the JSON files of a Hugging Face checkpoint.

A model with a setting that minisgl does not support and that would change the output is refused.
The error names the setting.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from minisgl.core import ConfigError, EngineConfig
from minisgl.core.files import read_json
from minisgl.images.spec import image_spec
from minisgl.models.hf_config import HfConfig, HfGeneration, HfTokenizer, read_fields
from minisgl.models.loader import has_draft_head
from minisgl.models.registry import family_of
from minisgl.models.spec import ModelSpec
from minisgl.models.text_part import text_part

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def load_model_spec(folder: str, *, drafts: bool = False, images: bool = False) -> ModelSpec:
    """Read config.json and, if the folder has them, other files. Raises ConfigError.

    drafts: keep the draft head. Without it, also a checkpoint without a draft head is taken.
    images: keep the image encoder, if the model has one that is supported.
    generation_config.json: sampling defaults and end tokens; without it, tokenizer.json has the ids
    of ModelSpec.end_texts. hf_quant_config.json: quantisation by ModelOpt.
    preprocessor_config.json: the normalisation of images.
    """
    path = Path(folder)
    spec = _load(path, drafts, images)
    processing = image_spec(path) if spec.encoder is not None else None
    if spec.encoder is None or processing is None:
        return spec
    encoder = spec.encoder._replace(mean=processing.mean, std=processing.std)
    return msgspec.structs.replace(spec, encoder=encoder)


def _load(path: Path, drafts: bool, images: bool) -> ModelSpec:
    """Return the model without the values of preprocessor_config.json. Raises ConfigError."""
    config = read_json(path / "config.json")
    modelopt = path / "hf_quant_config.json"
    if config.get("quantization_config") is None and modelopt.exists():
        settings = read_json(modelopt).get("quantization")
        settings = settings if isinstance(settings, dict) else {}
        config = {**config, "quantization_config": {"quant_method": "modelopt", **settings}}
    generation_path = path / "generation_config.json"
    if generation_path.exists():
        generation = read_json(generation_path)
        return model_spec_from(config, generation, drafts=drafts, images=images)
    tokenizer = path / "tokenizer.json"
    spec = model_spec_from(config, drafts=drafts, images=images)
    if not spec.end_texts or not tokenizer.exists():
        return spec
    added = read_fields(read_json(tokenizer), HfTokenizer, tokenizer.name)
    ends = {"eos_token_id": added.ids_of(spec.end_texts)}
    return model_spec_from(config, ends, drafts=drafts, images=images)


def draft_method(config: EngineConfig) -> str | None:
    """Return the source of drafts: ngram, mtp or None. Raises ConfigError.

    auto means mtp if config.json describes a draft head and the weights have its tensors. mtp needs
    both.
    """
    if config.speculative not in ("mtp", "auto"):
        return config.speculative
    given = text_part(read_json(Path(config.model_path) / "config.json"))
    described = full_spec(given).draft_head is not None
    stored = config.dummy_weight or has_draft_head(config.model_path)
    if config.speculative == "auto":
        return "mtp" if described and stored else "ngram"
    if described and not stored:
        raise ConfigError(
            f"speculative mtp needs a draft head, and the weights in {config.model_path} have no "
            "tensors mtp.*; use speculative ngram or auto"
        )
    return "mtp"  # load_model_spec refuses a model that describes no draft head


def engine_model(config: EngineConfig) -> ModelSpec:
    """Return the model as an engine with this configuration runs it. Raises ConfigError."""
    drafts = draft_method(config) == "mtp"
    return load_model_spec(config.model_path, drafts=drafts, images=not config.no_images)


def full_spec(config: Mapping[str, Any], *, images: bool = False) -> ModelSpec:
    """Return the model of config.json, without the values of other files. Raises ConfigError.

    images: as for load_model_spec.
    """
    family = family_of(config.get("architectures"))
    config = {**family.defaults, **config, **({} if images else {"vision_config": None})}
    return family.spec(read_fields(config, HfConfig, "config.json"), config)


def model_spec_from(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    *,
    drafts: bool = False,
    images: bool = False,
) -> ModelSpec:
    """Check and complete the two JSON objects. Raises ConfigError that names the wrong field.

    drafts, images: as for load_model_spec.
    """
    spec = full_spec(text_part(config), images=images)
    if not drafts:
        spec = spec.without_drafts()
    elif spec.draft_head is None:
        raise ConfigError(
            "speculative mtp needs a model with a draft head, and this model has none "
            "(mtp_num_hidden_layers in config.json); use speculative ngram"
        )
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
