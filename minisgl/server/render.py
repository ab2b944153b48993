"""The start of a server with --render-only: the facts of a model without an engine."""

from pathlib import Path
from typing import Any

import msgspec

from minisgl.core import ConfigError, EngineConfig, ModelFacts
from minisgl.core.files import read_json
from minisgl.images import image_spec
from minisgl.models.text_part import text_part


class _Config(msgspec.Struct):
    """The fields of config.json that render routes need."""

    vocab_size: int
    max_position_embeddings: int
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


def facts_of(engine: EngineConfig) -> ModelFacts:
    """Read the facts of a model from its folder. Raises ConfigError.

    The context length of a YaRN model is computed as in models/rope.py, which loads torch. If the
    rotary settings differ by kind of layer, those of `full_attention` count.
    """
    try:
        settings = text_part(read_json(Path(engine.model_path) / "config.json"))
        config = msgspec.convert(settings, _Config)
        given = config.rope_parameters or {}
        kinds = [given.get(kind) for kind in ("full_attention", "sliding_attention")]
        rope = {**(config.rope_scaling or {}), **given}
        if any(isinstance(kind, dict) for kind in kinds):
            rope = kinds[0] or {}
        context = config.max_position_embeddings
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type", rope.get("type")) == "yarn" and original is not None:
            context = max(context, int(original * rope.get("factor", 1)))
    except (msgspec.ValidationError, TypeError) as error:
        raise ConfigError(f"config.json: {error}") from None
    length = context if engine.max_seq_len is None else min(engine.max_seq_len, context)
    return ModelFacts(
        max_seq_len=length,
        vocab_size=config.vocab_size,
        eos_token_ids=(),
        kv_capacity_tokens=length,
        page_size=engine.page_size,
        device="none",
        dtype="none",
        kv_dtype="none",
        images=not engine.no_images and image_spec(engine.model_path) is not None,
    )
