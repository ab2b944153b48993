"""The memory of layers with recurrent states, as their specs describe it."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from minisgl.distributed.comm import TPInfo


class StatePart(NamedTuple):
    """A tensor of the memory of one row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StateBuild(NamedTuple):
    """The memory that a rank allocates for layers with recurrent states.

    rows    rows of each layer, with one for padding.
    drafts  whether steps have drafts.
    dtype   of the model's activations.
    """

    rows: int
    page_size: int
    drafts: bool
    tp: TPInfo
    dtype: torch.dtype
    device: torch.device


@runtime_checkable
class StateSpec(Protocol):
    """The spec of a mixer that keeps a recurrent state for each row (kernel/states.py).

    The state stands at the end of a page, and the mixer keeps a history of the tokens after it.
    """

    @property
    def layer(self) -> int:
        """The index of the layer's memory (ForwardContext.states), from 0 without gaps."""

    def kept(self, build: StateBuild) -> tuple[StatePart, ...]:
        """Return the parts of a row that a copy of its state holds: all that the layer needs of the
        tokens before the boundary."""

    def memory(self, kept: Sequence[Tensor], build: StateBuild) -> Any:
        """Return the memory of the layer. kept: [rows, ...], tensors for the parts of `kept`. The
        entries of a row are contiguous in each of them; the rows are not.
        """

    def step_bytes(self, page_size: int) -> int:
        """Return the bytes of state and history that a decode request moves, of all heads."""
