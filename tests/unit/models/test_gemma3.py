"""The image encoder of Gemma 3 in its config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core import ConfigError, EngineConfig
from minisgl.core.images import ImageLimits
from minisgl.distributed.comm import TPInfo
from minisgl.engine.images import image_limits
from minisgl.models.config import model_spec_from
from minisgl.models.encoder import ImageEncoder

# The config.json of the 4B model, which leaves out many values.
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 256,
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def test_encoder_of_the_4b_model_has_its_published_size() -> None:
    spec = model_spec_from(CONFIG, images=True)
    encoder = spec.encoder
    assert encoder is not None
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in ImageEncoder(encoder).parameters()]
    assert sum(sizes) == encoder.weights == 416_866_032 + 1152 + 1152 * 2560
    assert (spec.largest_span, encoder.side, encoder.merge) == (256, 64, 4)
    assert encoder.flops((64, 64)) == pytest.approx(5.4e12, rel=0.1)
    assert model_spec_from(CONFIG).encoder is None


def test_a_buffer_without_room_for_three_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec, one, cpu = model_spec_from(CONFIG, images=True), TPInfo(0, 1), torch.device("cpu")

    def limits(rows: int) -> ImageLimits | None:
        config = EngineConfig(model_path=str(tmp_path), image_cache_tokens=rows)
        return image_limits(config, spec, one, cpu)

    found = limits(768)
    assert found is not None
    assert found.most_tokens == 256
    with pytest.raises(ConfigError, match=r"--image-cache-tokens is 767, .* at least 768"):
        limits(767)


def test_prices_on_a_gpu_count_slower_operations_and_the_launch_of_each_layer(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    spec, config = model_spec_from(CONFIG, images=True), EngineConfig(model_path=str(tmp_path))
    cpu, gpu = (
        image_limits(config, spec, TPInfo(0, 1), torch.device(device)) for device in ("cpu", "cuda")
    )
    assert cpu is not None
    assert gpu is not None
    assert spec.encoder is not None
    large, small = (128, 128), (4, 4)
    assert gpu.price(large) == pytest.approx(1.45 * cpu.price(large), rel=1e-3)
    launches_flops, large_flops = 27 * 3e11, spec.encoder.flops(large)
    launches = cpu.price(large) * launches_flops / large_flops
    assert gpu.price(small) == pytest.approx(launches, rel=1e-3)
    assert cpu.price(small) < launches / 100


@pytest.mark.parametrize(
    ("outer", "vision", "says"),
    [
        ({}, {"model_type": "clip_vision_model"}, "model_type 'clip_vision_model'"),
        ({}, {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({}, {"num_channels": 4}, "num_channels 4 is not supported"),
        ({}, {"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05 is not supported"),
        ({}, {"num_attention_heads": 7}, "expected a multiple of 4 \\* num_attention_heads 7"),
        ({}, {"image_size": 897}, "images of 897 pixels"),
        ({"mm_tokens_per_image": 200}, {}, "mm_tokens_per_image 200"),
    ],
)
def test_other_encoders_are_refused_by_name(
    outer: dict[str, Any], vision: dict[str, Any], says: str
) -> None:
    config = {**CONFIG, **outer, "vision_config": CONFIG["vision_config"] | vision}
    with pytest.raises(ConfigError, match=says):
        model_spec_from(config, images=True)
