"""The stage that encodes the images of a step."""

import weakref
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from minisgl.core.images import EncodeImage, EncodingState
from minisgl.engine.images import EncodeImages
from minisgl.engine.step_tensors import StepTensors
from minisgl.models.encoder import Encoding

LAYERS = 4


class OneEncoding:
    """An encoder that requires that no other encoding is in memory when one begins."""

    spec = SimpleNamespace(patch=1, depth=LAYERS)

    def __init__(self) -> None:
        self.patches = list[weakref.ref[Tensor]]()

    def begin(self, pixels: Tensor) -> Encoding:
        assert all(each() is None for each in self.patches)
        x = pixels.view(-1, 3).float()
        self.patches.append(weakref.ref(x))
        return Encoding(x, x)

    def advance(self, encoding: Encoding, first: int, end: int) -> Encoding:
        x = encoding.x + (end - first)
        self.patches.append(weakref.ref(x))
        return Encoding(x, encoding.angles)

    def finish(self, encoding: Encoding) -> Tensor:
        return encoding.x


def part(value: int, first: int, end: int, rows: list[int], state: EncodingState) -> EncodeImage:
    taken = np.array(rows if end == LAYERS else [], dtype=np.int32)
    return EncodeImage((1, 1), bytes([value] * 3), taken, 1, first, end, state)


def test_memory_of_an_image_is_free_before_the_next_one_begins() -> None:
    buffer = torch.zeros(3, 3)
    stage = EncodeImages(cast("Any", OneEncoding()), buffer)
    first, second, third = EncodingState(), EncodingState(), EncodingState()
    steps = [
        (part(10, 0, 2, [], first),),
        (part(10, 2, 4, [1], first), part(20, 0, 4, [2], second), part(30, 0, 1, [], third)),
        (part(30, 1, 4, [0], third),),
    ]
    for images in steps:
        stage.before(cast("StepTensors", SimpleNamespace(batch=SimpleNamespace(images=images))))
    assert buffer[:, 0].tolist() == [34, 14, 24]
