"""The image encoder against transformers, on tiny float32 models."""

from pathlib import Path

import pytest
import torch

from minisgl.core import EngineConfig
from minisgl.distributed.comm import SingleCommunicator
from minisgl.models.build import build_model
from minisgl.models.config import load_model_spec
from minisgl.quantization import with_quantizations
from tests.parity.image_models import MODELS, picture, processed, save


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_features_of_an_image_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, path = save(name, tmp_path)
    spec = load_model_spec(path, images=True)
    ours = build_model(
        spec,
        EngineConfig(model_path=path),
        device=torch.device("cpu"),
        dtype=torch.float32,
        comm=SingleCommunicator(),
        extensions=with_quantizations(),
    )
    assert spec.vision is not None
    assert ours.visual is not None
    for grid in ((4, 6), (2, 2), (18, 4)):
        pixels = picture(*grid)
        given = processed([pixels])
        expected = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
        taps = getattr(expected, "deepstack_features", [])
        wanted = torch.cat((expected.pooler_output, *taps), dim=1)
        assert wanted.shape[1] == spec.vision.width
        torch.testing.assert_close(ours.visual.encode(pixels), wanted, atol=2e-3, rtol=2e-3)
