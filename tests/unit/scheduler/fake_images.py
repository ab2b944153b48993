"""Images of requests, and an image buffer without an encoder."""

import hashlib
from collections.abc import Sequence

import numpy as np

from minisgl.core.batch import Int32Array
from minisgl.core.images import EncodeImage, Grid, ImageMemory
from minisgl.message.messages import PromptImage

PATCH, MERGE = 2, 1


def image_memory(rows: int, token: int = 7, price: float = 1.0) -> ImageMemory:
    """Return a buffer of that many rows. A token is one patch. price: of a patch, in tokens."""
    return ImageMemory(rows, PATCH, MERGE, token, price, 0.0)


def pads_of(pixels: bytes, grid: Grid) -> list[int]:
    """Return ids that stand for these pixels, one for each token: negative, with 30 bits."""
    count = grid[0] * grid[1]
    stream = hashlib.shake_256(pixels + bytes(grid)).digest(4 * count)
    return (-2 - (np.frombuffer(stream, dtype="<u4").astype(np.int64) >> 2)).tolist()


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
        ids += pads_of(pixels, grid)
    return ids, tuple(images)


class FakeImages:
    """The buffer of an engine. A row holds the pad of its image token in place of features."""

    def __init__(self, memory: ImageMemory | None) -> None:
        self._rows = np.zeros(0 if memory is None else memory.rows, dtype=np.int32)
        self.encoded = 0

    def encode(self, image: EncodeImage) -> None:
        pads = pads_of(image.pixels, image.grid)
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
