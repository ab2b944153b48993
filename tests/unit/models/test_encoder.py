"""An image that is encoded in parts has the features of the whole encoding."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from minisgl.core.images import EncodeImage, EncodingState
from minisgl.engine.images import EncodeImages
from minisgl.models.encoder import ImageEncoder
from minisgl.models.loader import materialise
from tests.unit.models.encoders import SPEC

Part = tuple[int, int]  # the first layer and the end


@pytest.fixture(scope="module")
def encoder() -> ImageEncoder:
    with torch.device("meta"):
        found = ImageEncoder(SPEC)
    materialise(found, torch.device("cpu"), torch.float32)
    torch.manual_seed(0)
    for parameter in found.parameters():
        parameter.data.normal_(0.0, 0.3)
    return found


def part_of(pixels: torch.Tensor, begin: int, part: Part, state: EncodingState) -> EncodeImage:
    """Return a part of an image whose rows of the buffer begin at `begin`."""
    rows, columns = (size // SPEC.patch for size in pixels.shape[:2])
    places = np.arange(begin, begin + rows * columns // SPEC.merge**2, dtype=np.int32)
    last = part[1] == SPEC.depth
    written = places if last else places[:0]
    return EncodeImage((rows, columns), pixels.numpy().tobytes(), written, 1, *part, state)


def run(stage: EncodeImages, *images: EncodeImage) -> None:
    """Run the part of the stage in a step with these images."""
    stage.before(cast(Any, SimpleNamespace(batch=SimpleNamespace(images=images))))


@torch.inference_mode()
def test_an_image_in_parts_has_the_features_of_the_whole_bit_for_bit(encoder: ImageEncoder) -> None:
    """Small images are encoded whole in the steps between. A dropped image leaves no trace."""
    images = [torch.randint(0, 256, (32 * n, 96, 3), dtype=torch.uint8) for n in (1, 2, 3)]
    small, large, dropped = images
    buffer = torch.zeros((100, SPEC.width))
    stage = EncodeImages(encoder, buffer)
    steps: list[list[tuple[torch.Tensor, int, Part]]] = [
        [(dropped, 20, (0, 2))],
        [(large, 10, (0, 1))],
        [(small, 0, (0, 3)), (large, 10, (1, 2))],
        [(large, 10, (2, 3)), (dropped, 20, (0, 1))],
        [(dropped, 20, (1, 3))],
    ]
    states: dict[int, EncodingState] = {}
    for step in steps:
        states |= {begin: EncodingState() for _, begin, part in step if part[0] == 0}
        run(stage, *(part_of(*each, states[each[1]]) for each in step))
    for pixels, begin in ((small, 0), (large, 10), (dropped, 20)):
        wanted = encoder.encode(pixels)
        assert torch.equal(buffer[begin : begin + len(wanted)], wanted)


@torch.inference_mode()
def test_the_state_of_an_image_leaves_with_its_last_part(encoder: ImageEncoder) -> None:
    stage, state = EncodeImages(encoder, torch.zeros((100, SPEC.width))), EncodingState()
    pixels = torch.zeros((32, 96, 3), dtype=torch.uint8)
    run(stage, part_of(pixels, 0, (0, 2), state))
    run(stage, part_of(pixels, 0, (2, 3), state))
    assert state.value is None
    with pytest.raises(AssertionError, match="no step has begun"):
        run(stage, part_of(pixels, 0, (2, 3), state))
