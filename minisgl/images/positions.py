"""Positions of the tokens of a prompt with images, for rotary embeddings with three axes.

A text token advances all three axes: frame, row and column. The tokens of an image lie on a plane:
at position p, the token in row r and column c has the position (p, p + r, p + c). The text after it
begins at p plus the larger side of the plane. Source: Wang et al. 2024 (Qwen2-VL, M-RoPE).
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Placed(Protocol):
    """An image in a prompt, as message.PromptImage."""

    @property
    def start(self) -> int: ...

    @property
    def grid(self) -> tuple[int, int]: ...


def rotary_positions(
    images: Sequence[Placed], merge: int, first: int, end: int
) -> NDArray[np.int32]:
    """Return int32 [3, end - first]: the positions of the tokens `first` to `end` - 1.

    images: those of the request, in the order of their tokens. merge: as in ImageSpec.
    """
    index = np.arange(first, end, dtype=np.int32)
    found = np.tile(index, (3, 1))
    for image in images:
        rows, columns = (size // merge for size in image.grid)
        begin, after = image.start, image.start + rows * columns
        found[:, index >= after] += max(rows, columns) - rows * columns
        inside = (index >= begin) & (index < after)
        nth = index[inside] - begin
        found[:, inside] -= nth
        found[1, inside] += nth // columns
        found[2, inside] += nth % columns
    return found


def rotary_delta(images: Sequence[Placed], merge: int) -> int:
    """Return the position of the tokens after the last image, less their index."""
    planes = (tuple(size // merge for size in image.grid) for image in images)
    return sum(max(plane) - plane[0] * plane[1] for plane in planes)
