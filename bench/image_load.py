"""Images in a simulated load: an encoder that takes a given time, and an image in each prompt."""

import hashlib
from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np

from minisgl.benchmark.trace import Load
from minisgl.core import ConfigError, EngineConfig, StepCost
from minisgl.core.images import ImageLimits
from minisgl.images import pad_ids
from minisgl.message.messages import PromptImage

_LAYERS, _PATCH, _MERGE = 27, 16, 2  # of the encoder of Qwen3.5
_TOKEN = 0


class ImageLoad(NamedTuple):
    """A load, and the images of each of its requests."""

    load: Load
    images: Sequence[tuple[PromptImage, ...]]


def encoder_limits(seconds: float, cost: StepCost) -> ImageLimits:
    """Return the limits of an encoder that takes this time for each image of the load."""
    tokens = seconds * cost.tokens[-1] / cost.seconds[-1]
    rows = EngineConfig(model_path="").image_cache_tokens
    return ImageLimits(rows, _PATCH, _MERGE, _TOKEN, 0.0, 0.0, _LAYERS, tokens / _LAYERS)


def with_images(load: Load, side: int, limits: ImageLimits) -> ImageLoad:
    """Put a new image of side x side pixels before each prompt. limits: of encoder_limits.

    Raises ConfigError if the image has no token, or more than ImageLimits.most_tokens.
    """
    unit = _PATCH * _MERGE
    edge = side // unit * _MERGE
    grid = (edge, edge)
    if not 0 < limits.tokens(grid) <= limits.most_tokens:
        raise ConfigError(
            f"--images: an image of {side} x {side} pixels has {limits.tokens(grid)} tokens; give "
            f"a SIDE of {unit} to {(isqrt(limits.most_tokens) + 1) * unit - 1}"
        )
    pixels = bytes(3 * (edge * _PATCH) ** 2)
    prompts, images = [], []
    for index, prompt in enumerate(load.prompts):
        digest = hashlib.sha256(b"%d" % index).digest()
        pads = np.array(pad_ids(digest, grid, edge**2 // _MERGE**2), dtype=np.int32)
        prompts.append(np.concatenate([pads, prompt]))
        images.append((PromptImage(start=0, grid=grid, digest=digest, pixels=pixels),))
    return ImageLoad(load._replace(prompts=prompts), images)
