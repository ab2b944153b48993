"""The recent final hidden states of each row, as a recurrent state."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.core.config import MAX_DRAFTS
from minisgl.layers.states import StateBuild, StatePart


class HiddenMemory(NamedTuple):
    """ring: [rows, W, H]; the final hidden state at position p of a row is at p % W."""

    ring: Tensor


class HiddenSpec(NamedTuple):
    """The final hidden states that a draft head reads; implements StateSpec.

    A step reads the state of the token before its first one, and writes those of its tokens and of
    the drafts after them. A copy of a row at boundary b needs the state at b - 1. The last step
    before the copy begins at b + page - 1 at most. MAX_DRAFTS drafts in it, and as many after it,
    end at b + page - 1 + 2 * MAX_DRAFTS. A ring of two pages of 16 or more tokens then still has
    the state at b - 1: position b - 1 + 2 * page overwrites it.

    size   the width of a state, H.
    layer  as StateSpec.layer.
    """

    size: int
    layer: int

    def kept(self, build: StateBuild) -> tuple[StatePart, ...]:
        """See StateSpec: the ring."""
        assert build.page_size > 2 * MAX_DRAFTS, "drafts must not fill a page; this is a bug"
        return (StatePart((2 * build.page_size, self.size), build.dtype),)

    def memory(self, kept: Sequence[Tensor], build: StateBuild) -> HiddenMemory:
        """See StateSpec."""
        return HiddenMemory(*kept)

    def step_bytes(self, page_size: int) -> int:
        """See StateSpec: one state read and one written."""
        return 2 * self.size * torch.bfloat16.itemsize
