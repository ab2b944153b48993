"""The images of a step: the part of the contract between scheduler and engine (core.batch)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

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
                 that the layers compute in the same time in the largest step.
    pair_price   the same for a pair of patches of one image, for the attention between patches.
    layers       of the encoder. A step may compute a part of them.
    layer_price  the least price of a layer. The host takes this time to queue its kernels.
    mixed        the positions of image tokens have three axes (RopePositions).
    mutual       the tokens of an image attend to each other in both directions. A chunk never ends
                 within an image, since the keys of a token depend on all tokens of its image.
    grid         of every image; None: their sizes differ.
    """

    rows: int
    patch: int
    merge: int
    token: int
    patch_price: float
    pair_price: float
    layers: int
    layer_price: float
    mixed: bool = True
    mutual: bool = False
    grid: Grid | None = None

    def tokens(self, grid: Grid) -> int:
        """Return the number of tokens of an image."""
        return grid[0] * grid[1] // self.merge**2

    def largest_span(self, grids: Iterable[Grid]) -> int:
        """Return the most tokens of these images that one chunk must have together."""
        return max(map(self.tokens, grids), default=1) if self.mutual else 1

    @property
    def most_tokens(self) -> int:
        """The most tokens of an image: the smallest chunk may have tokens of three images.

        Such a chunk has a page of 64 tokens, and the smallest images have 64 tokens.
        """
        return self.rows // 3

    def price(self, grid: Grid, layers: int | None = None) -> int:
        """Return the prompt tokens that the model computes in the time of an image; at least 1.

        layers: of the encoder, from the first on; None: all of them.
        """
        patches = grid[0] * grid[1]
        whole = patches * (self.patch_price + patches * self.pair_price)
        price = max(round(max(whole, self.layers * self.layer_price)), 1)
        return price if layers is None else price * layers // self.layers

    def layers_within(self, grid: Grid, budget: int) -> int:
        """Return how many of the first layers have at most this price."""
        within = ((max(budget, 0) + 1) * self.layers - 1) // self.price(grid)
        return min(within, self.layers)


class EncodingState:
    """The state of an encoding between two steps that compute layers of the image.

    The scheduler makes one for each encoding, and passes it to every part. It drops the object when
    the next step does not continue the image, or when the last request with the image ends. The
    memory of the state is then free, also if no further step runs.

    value: of the engine. None: no step has computed layers, or a later step has taken the state.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Any = None

    def take(self) -> Any:
        """Return the value, and keep no reference to it."""
        value, self.value = self.value, None
        return value


class EncodeImage(NamedTuple):
    """The layers `first` to `end` - 1 of the encoding of an image, computed before those of a step.

    The part with the first layer reads the pixels. The part with the last layer writes the rows. At
    most one image of a step has layers left. Only the next step may continue it.

    pixels   uint8 [rows * patch, columns * patch, 3] of the grid, as in message.PromptImage.
    rows     int32 [n]; the rows of the buffer for the n tokens of the image. Empty if layers are
             left.
    seconds  the predicted time of these layers.
    state    the same object in all parts of one encoding.
    """

    grid: Grid
    pixels: bytes
    rows: NDArray[np.int32]
    seconds: float
    first: int
    end: int
    state: EncodingState


class ImageSpan(NamedTuple):
    """Tokens of one image in a chunk, which attend to each other in both directions.

    at          index of the request in the batch.
    first, end  positions in the request: the tokens first to end - 1.
    """

    at: int
    first: int
    end: int


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
