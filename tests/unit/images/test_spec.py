"""The settings of images in a model folder."""

import json

import pytest

from minisgl.core import ConfigError
from minisgl.images import ImageSpec, image_spec

CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "image_token_id": 248056,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "depth": 27},
}


def folder_with(path, config, processor=None):
    (path / "config.json").write_text(json.dumps(config))
    if processor is not None:
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
    return path


def test_spec_has_the_values_of_the_processor(tmp_path):
    processor = {
        "size": {"longest_edge": 2**20, "shortest_edge": 2**14},
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.2, 0.3, 0.4],
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "do_resize": None,
    }
    assert image_spec(folder_with(tmp_path, CONFIG, processor)) == ImageSpec(
        patch=16,
        merge=2,
        min_pixels=2**14,
        max_pixels=2**20,
        mean=(0.4, 0.5, 0.6),
        std=(0.2, 0.3, 0.4),
        image_token=248056,
    )


def test_older_names_of_the_bounds_come_first(tmp_path):
    processor = {"min_pixels": 2**12, "max_pixels": 2**16, "size": {"longest_edge": 2**20}}
    found = image_spec(folder_with(tmp_path, CONFIG, processor))
    assert (found.min_pixels, found.max_pixels) == (2**12, 2**16)


def test_folder_without_a_processor_has_the_values_of_qwen3_vl(tmp_path):
    found = image_spec(folder_with(tmp_path, CONFIG))
    assert (found.min_pixels, found.max_pixels) == (65_536, 16_777_216)
    assert (found.mean, found.std) == ((0.5,) * 3, (0.5,) * 3)


@pytest.mark.parametrize("architectures", [["Qwen3_5ForCausalLM"], [], None])
def test_model_without_an_encoder_has_no_spec(tmp_path, architectures):
    assert image_spec(folder_with(tmp_path, {**CONFIG, "architectures": architectures})) is None


@pytest.mark.parametrize(
    ("config", "processor", "named"),
    [
        ({"image_token_id": -1}, {}, "config.json"),
        ({"vision_config": None}, {}, "config.json"),
        ({}, {"size": {"shortest_edge": 1023}}, "1024 pixels"),
        ({}, {"min_pixels": 2**20, "max_pixels": 2**19}, "must not exceed"),
        ({}, {"image_std": [0.5, 0.5, 0]}, "image_std"),
        ({}, {"image_mean": [0.5]}, "preprocessor_config.json"),
    ],
)
def test_wrong_value_is_refused_with_the_file(tmp_path, config, processor, named):
    with pytest.raises(ConfigError, match=named):
        image_spec(folder_with(tmp_path, {**CONFIG, **config}, processor))


GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "vision_config": {"image_size": 896, "patch_size": 14, "model_type": "siglip_vision_model"},
}
PROCESSOR = {"size": {"height": 896, "width": 896}, "resample": 2, "do_pan_and_scan": None}


def test_gemma_3_has_images_of_one_size_between_two_tokens(tmp_path):
    """As published: config.json leaves out the ids of the tokens."""
    found = image_spec(folder_with(tmp_path, GEMMA, PROCESSOR))
    assert found == ImageSpec(
        patch=14,
        merge=4,
        min_pixels=896 * 896,
        max_pixels=896 * 896,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        image_token=262144,
        around=(255999, 256000),
        side=896,
        resample=2,
    )
    assert found.rendered_token == 255999
    assert image_spec(folder_with(tmp_path, {**GEMMA, "vision_config": None})) is None


@pytest.mark.parametrize(
    ("config", "processor", "named"),
    [
        ({}, {"do_pan_and_scan": True}, "do_pan_and_scan"),
        ({}, {"resample": 0}, "resample"),
        ({}, {"size": {"height": 896, "width": 448}}, "896 x 448 pixels are not supported"),
        ({"mm_tokens_per_image": 255}, {}, "mm_tokens_per_image 255"),
        ({"mm_tokens_per_image": 9}, {}, "mm_tokens_per_image 9"),
        ({"vision_config": {"image_size": 900}}, {"size": None}, "images of 900 pixels"),
    ],
)
def test_other_images_of_gemma_3_are_refused_by_name(tmp_path, config, processor, named):
    folder = folder_with(tmp_path, {**GEMMA, **config}, {**PROCESSOR, **processor})
    with pytest.raises(ConfigError, match=named):
        image_spec(folder)
