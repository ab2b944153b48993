"""Images of requests, and an image buffer without an encoder."""

import hashlib
from collections.abc import Sequence

import numpy as np

from minisgl.core.batch import Int32Array
from minisgl.core.images import EncodeImage, Grid, ImageLimits
from minisgl.images.pads import pad_ids
from minisgl.message.messages import PromptImage

PATCH, MERGE = 2, 1
LAYERS = 4  # of the encoder


def image_limits(
    rows: int, token: int = 7, price: float = 1.0, *, mutual: bool = False
) -> ImageLimits:
    """Return a buffer of that many rows. A token is one patch. price: of a patch, in tokens.

    mutual: as in ImageLimits. Positions then have one axis.
    """
    of_images = rows, PATCH, MERGE, token, price, 0.0, LAYERS, 0.0
    return ImageLimits(*of_images, mixed=not mutual, mutual=mutual)


def prompt_with(
    parts: Sequence[int | tuple[int, Grid]],
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """Return the ids and the images of a prompt. parts: ids, and the seeds of images with grids."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
            continue
        seed, grid = part
        pixels = np.random.default_rng(seed).bytes(3 * PATCH**2 * grid[0] * grid[1])
        digest = hashlib.sha256(pixels).digest()
        images.append(PromptImage(start=len(ids), grid=grid, digest=digest, pixels=pixels))
        ids += pad_ids(digest, grid, grid[0] * grid[1])
    return ids, tuple(images)


class FakeImages:
    """The buffer of an engine. A row holds the pad of its image token in place of features."""

    def __init__(self, limits: ImageLimits | None) -> None:
        self._rows = np.zeros(0 if limits is None else limits.rows, dtype=np.int32)
        self.encoded = 0

    def begin_step(self, images: Sequence[EncodeImage]) -> None:
        opened = [image for image in images if image.end < LAYERS]
        assert len(opened) <= 1, "two images have layers left"
        for image in images:
            assert 0 <= image.first < image.end <= LAYERS
            digest = hashlib.sha256(image.pixels).digest()
            assert image.state.take() == ((digest, image.first) if image.first else None)
            if image.end == LAYERS:
                self._write(image)
            else:
                assert not len(image.rows)
                image.state.value = digest, image.end

    def _write(self, image: EncodeImage) -> None:
        digest, count = hashlib.sha256(image.pixels).digest(), image.grid[0] * image.grid[1]
        pads = pad_ids(digest, image.grid, count)
        assert len({*image.rows.tolist()}) == len(pads)
        self._rows[image.rows] = pads
        self.encoded += 1

    def pads(self, ids: Int32Array) -> Int32Array:
        """Return ids of a chunk with the pads in place of the rows of the buffer."""
        is_image = ids < 0
        found = ids.copy()
        found[is_image] = self._rows[~ids[is_image]]
        assert (found[is_image] < 0).all(), "a row was read that no step wrote"
        return found
