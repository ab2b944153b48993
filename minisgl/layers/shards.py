"""Which part of which checkpoint tensor a parameter of this rank holds, as data."""

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from minisgl.core import ConfigError


class Shard(NamedTuple):
    """One of the checkpoint tensors that are merged into a parameter, and this rank's cut of it.

    name   the checkpoint's module name beside ours, such as q_proj.
    full   rows (or columns) in the checkpoint.
    begin  the first one that is ours.
    local  how many rows we keep for it; those at or past `full` stay zero (padding).
    """

    name: str
    full: int
    begin: int
    local: int

    @property
    def end(self) -> int:
        """One past the last row that is read; equal to begin when all of ours is padding."""
        return max(self.begin, min(self.begin + self.local, self.full))


class Placement(NamedTuple):
    """Copy source[..., begin:end along dim, ...] to target[expert] at `offset` along dim.

    shape is the whole source's, to be checked; dim None copies all of it. `expert` picks one
    slice of a stacked parameter, None takes the parameter itself.
    """

    source: str
    shape: tuple[int, ...]
    target: str
    dim: int | None = None
    begin: int = 0
    end: int = 0
    offset: int = 0
    expert: int | None = None


@runtime_checkable
class Sharded(Protocol):
    """A module that knows where its own parameters come from."""

    def placements(self, name: str) -> Iterator[Placement]:
        """One or more placements for each parameter; `name` is the module's name in the model."""


def split_evenly(name: str, full: int, rank: int, size: int, unit: int = 1) -> Shard:
    """Cut into `size` equal parts of whole units, the last ones padded where it does not divide."""
    local = -(-full // (size * unit)) * unit
    return Shard(name, full, rank * local, local)


def split_heads(name: str, heads: int, head_dim: int, rank: int, size: int) -> Shard:
    """Cut by whole heads; with fewer heads than ranks, neighbours share a copy of one.

    Raises ConfigError when neither count divides the other.
    """
    if heads % size == 0:
        local, first = heads // size, rank * (heads // size)
    elif size % heads == 0:
        local, first = 1, rank // (size // heads)
    else:
        raise ConfigError(f"{heads} heads of {name} cannot be split over tensor-parallel {size}")
    return Shard(name, heads * head_dim, first * head_dim, local * head_dim)
