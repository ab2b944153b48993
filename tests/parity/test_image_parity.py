"""Models with images against transformers: features, positions and logits, without an engine."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from minisgl.distributed.comm import SingleCommunicator
from minisgl.images.positions import rotary_delta, rotary_positions
from tests.parity.hybrid import Runner
from tests.parity.image_logits import check_logits
from tests.parity.image_models import MERGE, MODELS, picture, processed, prompt_of, save
from tests.unit.distributed.ranks import run_ranks


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_features_of_an_image_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, path = save(name, tmp_path)
    ours = Runner(path, SingleCommunicator(), images=True)
    spec, encoder = ours.spec.encoder, ours.model.encoder
    assert spec is not None
    assert encoder is not None
    for grid in ((4, 6), (2, 2), (18, 4)):
        pixels = picture(*grid)
        given = processed([pixels])
        expected = model.model.visual(given["pixel_values"], grid_thw=given["image_grid_thw"])
        taps = getattr(expected, "deepstack_features", [])
        wanted = torch.cat((expected.pooler_output, *taps), dim=1)
        assert wanted.shape[1] == spec.width
        torch.testing.assert_close(encoder.encode(pixels), wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("size", [1, 7, 64])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_chunks_that_cut_images_are_those_of_transformers(
    name: str, size: int, tmp_path: Path
) -> None:
    model, path = save(name, tmp_path)
    check_logits(SingleCommunicator(), path, prompt_of(model), size)


def test_two_ranks_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model, path = save("qwen3-vl", tmp_path)
    run_ranks(2, tmp_path, check_logits, path, prompt_of(model), 7)


class Placed(NamedTuple):
    start: int
    grid: tuple[int, int]


def test_positions_are_those_of_transformers(tmp_path: Path) -> None:
    """Of each part of random prompts, and of the text after their images."""
    model, random = save("qwen3-vl", tmp_path)[0].model, np.random.default_rng(0)
    for _ in range(50):
        images, kinds = list[Placed](), [0] * int(random.integers(0, 4))
        for rows, cols in random.integers(1, 7, (int(random.integers(0, 4)), 2)).tolist():
            images.append(Placed(len(kinds), (rows * MERGE, cols * MERGE)))
            kinds += [1] * (rows * cols) + [0] * int(random.integers(1, 4))
        kinds = kinds or [0]
        grids = torch.tensor([(1, *image.grid) for image in images]).reshape(-1, 3)
        ids = torch.zeros((1, len(kinds)), dtype=torch.int64)
        expected, delta = model.get_rope_index(
            ids, torch.tensor([kinds]), grids if images else None
        )
        first, end = sorted(random.integers(0, len(kinds) + 1, 2).tolist())
        found = rotary_positions(images, MERGE, first, end)
        assert found.tolist() == expected[:, 0, first:end].tolist()
        assert rotary_delta(images, MERGE) == int(delta)
        assert (rotary_positions(images, MERGE, 0, len(kinds)) == expected[:, 0].numpy()).all()
