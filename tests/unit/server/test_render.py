"""The facts of a model for a server that only renders prompts."""

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.core import ConfigError, EngineConfig
from minisgl.server.render import facts_of

FIELDS = {"vocab_size": 320, "max_position_embeddings": 128}


def facts(folder: Path, config: dict[str, Any], **settings: Any) -> tuple[int, int]:
    """Return the vocabulary and the context length of a folder with this config.json."""
    (folder / "config.json").write_text(json.dumps(config))
    found = facts_of(EngineConfig(model_path=str(folder), **settings))
    return found.vocab_size, found.max_seq_len


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"type": "longrope", "original_max_position_embeddings": 32}, 128),
        ({"type": "linear", "factor": 4.0}, 128),
    ],
)
def test_the_context_is_that_of_the_engine(
    rope: dict[str, Any], context: int, tmp_path: Path
) -> None:
    assert facts(tmp_path, {**FIELDS, "rope_scaling": rope}) == (320, context)
    assert facts(tmp_path, {**FIELDS, "rope_scaling": rope}, max_seq_len=16) == (320, 16)


def test_the_layers_with_full_attention_give_the_context_of_a_model_with_windows(
    tmp_path: Path,
) -> None:
    """Regression: the settings of each kind of layers were ignored."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    kinds = {"full_attention": yarn, "sliding_attention": {"rope_type": "default"}}
    assert facts(tmp_path, {**FIELDS, "rope_parameters": kinds}) == (320, 512)
    only_windows = {"rope_scaling": yarn, "rope_parameters": {"sliding_attention": yarn}}
    assert facts(tmp_path, {**FIELDS, **only_windows}) == (320, 128)


def test_the_language_model_beside_an_encoder_has_a_config_of_its_own(tmp_path: Path) -> None:
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "text_config": {**FIELDS, "model_type": "mistral"},
        "vision_config": {},
    }
    assert facts(tmp_path, config) == (320, 128)


def test_images_are_rendered_for_a_model_with_an_encoder(tmp_path: Path) -> None:
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**FIELDS, "model_type": "qwen3_5_text"},
        "image_token_id": 5,
        "vision_config": {},
    }
    facts(tmp_path, config)
    for no_images in (False, True):
        engine = EngineConfig(model_path=str(tmp_path), no_images=no_images)
        assert facts_of(engine).images is not no_images


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size"):
        facts(tmp_path, {"max_position_embeddings": 128})
