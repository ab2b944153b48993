"""The images of a step: the part of the contract between scheduler and engine (core.batch)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int]  # rows and columns of patches


class ImageLimits(NamedTuple):
    """The sizes and prices of an image encoder, and of the buffer that takes its results.

    rows         of the buffer. The features of an image token take one row.
    patch        height and width of a patch in pixels.
    merge        `merge` x `merge` neighbouring patches become one token.
    token        the id of an image token in the model's vocabulary. It stands for all image tokens
                 where only ids of the vocabulary make sense, such as in penalties.
    patch_price  the time that the encoder takes for a patch, beside attention, in prompt tokens
                 that the layers compute in the same time.
    pair_price   the same for a pair of patches of one image, for the attention between patches.
    """

    rows: int
    patch: int
    merge: int
    token: int
    patch_price: float
    pair_price: float

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image."""
        return grid[0] * grid[1] // self.merge**2

    @property
    def most_tokens(self) -> int:
        """The most tokens of an image: the smallest chunk may have tokens of three images.

        Such a chunk has a page of 64 tokens, and the smallest images have 64 tokens.
        """
        return self.rows // 3

    def price(self, grid: Grid) -> int:
        """Return the prompt tokens that the layers compute in the time of an image; at least 1."""
        patches = grid[0] * grid[1]
        return max(round(patches * (self.patch_price + patches * self.pair_price)), 1)


class EncodeImage(NamedTuple):
    """An image that a step encodes before its layers.

    pixels  uint8 [rows * patch, columns * patch, 3] of the grid, as in message.PromptImage.
    rows    int32 [n]; the rows of the buffer for the n tokens of the image.
    price   as ImageLimits.price.
    """

    grid: Grid
    pixels: bytes
    rows: NDArray[np.int32]
    price: int


class RopePositions(NamedTuple):
    """Positions for the rotary embedding of a step in which a request has images.

    The position of a token of an image has three parts: frame, row and column. Those of a text
    token are equal.

    deltas  int32 [B]; after the images of a request, the position of a token is its index plus this
            number. 0 for a request without images.
    chunks  int32 [3, n]; the positions of the n tokens of all chunks. None if each chunk begins
            after the images of its request, so that `deltas` suffice.
    """

    deltas: NDArray[np.int32]
    chunks: NDArray[np.int32] | None
