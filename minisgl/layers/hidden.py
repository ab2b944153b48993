"""The recent final hidden states of each row, as a recurrent state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.layers.mixer import StateBuild, StatePart


class HiddenMemory(NamedTuple):
    """ring: [rows, W, H]; the final hidden state at position p of a row is at p % W."""

    ring: Tensor


class HiddenSpec(NamedTuple):
    """The final hidden states that a draft head reads; implements StateSpec.

    A step reads the state of the token before its first one, and then overwrites up to two pages of
    positions after it: its tokens and the drafts after them. A ring of two pages therefore has the
    state at each boundary of a row as long as a copy of the row's states may need it.

    size   the width of a state, H.
    layer  as StateSpec.layer.
    """

    size: int
    layer: int

    def kept(self, build: StateBuild) -> tuple[StatePart, ...]:
        """See StateSpec: the ring."""
        return (StatePart((2 * build.page_size, self.size), build.dtype),)

    def memory(self, kept: Sequence[Tensor], build: StateBuild) -> HiddenMemory:
        """See StateSpec."""
        return HiddenMemory(*kept)

    def step_bytes(self, page_size: int) -> int:
        """See StateSpec: one state read and one written."""
        return 2 * self.size * torch.bfloat16.itemsize
