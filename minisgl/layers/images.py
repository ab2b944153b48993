"""Values of image tokens that the layers of a language model read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class ImageFeatures(NamedTuple):
    """The features of the image tokens of a step (models.encoder.ImageEncoder.encode).

    ids     int32 [T] of the tokens. Id ~i, which is negative, has row i of `buffer`.
    buffer  [N, n * H]: the embedding of an image token, then the features for DeepStack.
    """

    ids: Tensor
    buffer: Tensor

    def part(self, number: int, size: int) -> Tensor:
        """Return the features `number` of all tokens, [T, size]; zeros for text tokens."""
        found = self.buffer[:, number * size :][:, :size][(~self.ids).clamp(min=0).long()]
        return found.masked_fill_((self.ids >= 0).unsqueeze(1), 0.0)


class MixedAngles(NamedTuple):
    """The angles of image tokens, whose position has three parts: frame, row and column.

    Each frequency follows one of the parts (Qwen3-VL, interleaved M-RoPE). A rotary table has
    further rows after those of the positions. A step with images writes the mixed angles of its
    image tokens there, and the tokens get the numbers of these rows as positions. The kernels
    read one position for each token, as without images.

    first  the number of the first further row.
    axes   int64 [D], the part that each column of the table follows.
    """

    first: int
    axes: Tensor

    @classmethod
    def of(
        cls, sections: Sequence[int], head_dim: int, first: int, device: torch.device
    ) -> "MixedAngles":
        """sections: the frequencies that follow the frame, the row and the column.

        Frequency j follows part j % 3, and the frame where that part has all its frequencies.
        """
        axes = [j % 3 if j < 3 * sections[j % 3] else 0 for j in range(head_dim // 2)]
        return cls(first, torch.tensor(axes * 2, device=device))

    def mix(self, table: Tensor, positions: Tensor, turns: Tensor) -> None:
        """Write the further rows of `table`, and the row of each token to `turns`, int32 [n].

        table: as of rope_table, with further rows for n tokens. positions: int32 [3, n]. A token
        whose parts are equal gets an ordinary row.
        """
        frame, count = positions[0], positions.shape[1]
        rows = positions.t()[:, self.axes].long()
        table[self.first : self.first + count] = table.gather(0, rows)
        mixed = torch.arange(self.first, self.first + count, dtype=frame.dtype, device=frame.device)
        torch.where((positions == frame).all(0), frame, mixed, out=turns)
