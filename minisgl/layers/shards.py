"""The division of a checkpoint's tensors over the tensor-parallel ranks, as data."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from minisgl.core import ConfigError

# Names that safetensors gives to the floating-point types of unquantised weights.
FLOATS = ("F64", "F32", "BF16", "F16")


class Shard(NamedTuple):
    """This rank's share of one dimension of a checkpoint module.

    name   the last part of the module's name in the checkpoint, such as q_proj.
    full   rows (or columns) in the checkpoint.
    begin  the first row of this rank.
    local  rows that this rank stores. Rows at or past `full` are padding and stay zero.
    order  the order in which the model stores each group of len(order) rows. Empty: the
           order of the checkpoint.
    shift  the row of the checkpoint's tensor at which this module begins.
    rows   rows of the checkpoint's tensor, if it has more modules than this one; else 0.
    """

    name: str
    full: int
    begin: int
    local: int
    order: tuple[int, ...] = ()
    shift: int = 0
    rows: int = 0

    @property
    def stored(self) -> int:
        """Rows of the checkpoint's tensor."""
        return self.rows or self.full

    @property
    def read(self) -> tuple[int, int]:
        """The rows of the checkpoint's tensor that this rank reads: first, one past the last."""
        return self.shift + self.begin, self.shift + self.end

    @property
    def end(self) -> int:
        """One past the last row to read. Equal to begin when the whole share is padding."""
        return max(self.begin, min(self.begin + self.local, self.full))


class Placement(NamedTuple):
    """One copy from a checkpoint tensor to a parameter.

    The copy reads source[..., begin:end, ...] along dimension `dim` and writes it at `offset`
    along the same dimension of the parameter `target`. If `dim` is None, it copies the whole
    tensor, and `offset` is along dimension 0. If `expert` is given, it writes to target[expert].

    shape    the expected shape of the whole source tensor.
    stored   the types, in the spelling of safetensors, that the source tensor may have.
    order    the order of the rows in each group of len(order) rows (Shard.order).
    fused    the same values in a tensor of all experts, which the loader reads if the checkpoint
             lacks `source`.
    inside   the index along dimension 0 of the source at which `shape`'s other dimensions begin to
             count: the expert in a fused tensor. None: the source has no such dimension.
    along    the dimension of the parameter along which `offset` counts. None: `dim`.
    constant the value of the elements in a model of random weights. None: they are drawn.
    convert  computes the value to write from the part that was read, on the parameter's device.
             With it, dimensions of size 1 in the source need not match `shape`, because formats
             store scales as [N], as [N, 1] or as scalars.
    """

    source: str
    shape: tuple[int, ...]
    target: str
    dim: int | None = None
    begin: int = 0
    end: int = 0
    offset: int = 0
    expert: int | None = None
    stored: tuple[str, ...] = FLOATS
    order: tuple[int, ...] = ()
    convert: Callable[[Tensor], Tensor] | None = None
    fused: "FusedExperts | None" = None
    inside: int | None = None
    along: int | None = None
    constant: float | None = None

    @property
    def in_fused(self) -> "Placement":
        """This placement of the values in `fused`."""
        assert self.fused is not None, "a placement outside of fused experts; this is a bug"
        name, shape, first = self.fused
        begin, end = first + self.begin, first + self.end
        return self._replace(source=name, shape=shape, begin=begin, end=end, inside=self.expert)


class FusedExperts(NamedTuple):
    """A matrix of all experts in one tensor of the checkpoint.

    name: of the tensor. shape: its whole shape; the first dimension counts the experts. first: the
    row of each expert at which the matrix begins.
    """

    name: str
    shape: tuple[int, ...]
    first: int = 0


@runtime_checkable
class Sharded(Protocol):
    """A module that owns parameters and yields their placements."""

    def placements(self, name: str) -> Iterator[Placement]:
        """Yield one or more placements for each parameter. `name` is the module's full name."""


class LinearShards(NamedTuple):
    """The matrix [rows, columns] of a linear layer that this rank holds.

    outputs    the checkpoint's linears that the layer merges, in the order of their rows, each
               with this rank's share of its output features.
    inputs     this rank's share of the input features.
    bias       whether the checkpoint's linears have a bias.
    owns_bias  whether this rank loads the bias. The ranks of a row-parallel layer add up their
               outputs, so only one rank may add the bias. On the other ranks the bias stays zero.
    parent     the full name of the module that has the linears: model.layers.0.self_attn. Empty:
               the model itself.
    """

    outputs: tuple[Shard, ...]
    inputs: Shard
    bias: bool
    owns_bias: bool = True
    parent: str = ""

    @property
    def rows(self) -> int:
        """Output features on this rank, all merged linears together."""
        return sum(output.local for output in self.outputs)

    @property
    def names(self) -> list[str]:
        """The full names of the merged linears in the checkpoint."""
        parent = f"{self.parent}." if self.parent else ""
        return [f"{parent}{output.name}" for output in self.outputs]

    def placements(
        self,
        name: str,
        parameter: str,
        *,
        per_row: bool = False,
        stored: tuple[str, ...] = FLOATS,
        source: str = "",
    ) -> Iterator[Placement]:
        """Yield the placements of one parameter of a linear method, one for each merged linear.

        name       the full name of the method: model.layers.0.self_attn.qkv_proj.method.
        parameter  the name of the parameter in the method: weight.
        per_row    False: the parameter has an entry for each weight, [rows, columns].
                   True: it has one for each output feature, [rows].
        source     the name of the parameter in the checkpoint. Empty: the name in the method.
        """
        inputs, offset = self.inputs, 0
        first = inputs.read[0]
        cut_columns = not per_row and (first, inputs.local) != (0, inputs.stored)
        for output, linear in zip(self.outputs, self.names, strict=True):
            shape = (output.stored,) if per_row else (output.stored, inputs.stored)
            cut = (0, *output.read, offset)
            if cut_columns:
                cut = (1, *inputs.read, 0)
            tensor, target = f"{linear}.{source or parameter}", f"{name}.{parameter}"
            yield Placement(tensor, shape, target, *cut, stored=stored, order=output.order)
            offset += output.local


def merge(name: str, outputs: tuple[Shard, ...]) -> tuple[Shard, ...]:
    """Return `outputs` for a checkpoint that stores them as one tensor, in this order."""
    rows, shift, merged = sum(output.full for output in outputs), 0, []
    for output in outputs:
        merged.append(output._replace(name=name, shift=shift, rows=rows))
        shift += output.full
    return tuple(merged)


def split_evenly(name: str, full: int, rank: int, size: int, unit: int = 1) -> Shard:
    """Divide `full` rows into `size` equal shares of whole units. The last shares are padded."""
    local = -(-full // (size * unit)) * unit
    return Shard(name, full, rank * local, local)


def split_heads(
    name: str, heads: int, head_dim: int, rank: int, size: int, *, copies: bool = False
) -> Shard:
    """Divide the rows of `heads` attention heads into shares of whole heads.

    copies: with fewer heads than ranks, neighbouring ranks each store a copy of the same head.
    Raises ConfigError when the heads cannot be divided.
    """
    if heads % size and not (copies and size % heads == 0):
        raise ConfigError(
            f"{heads} heads of {name} cannot be split over tensor-parallel {size}: "
            "use a number of ranks that divides them"
        )
    local, first = max(heads // size, 1), rank * heads // size
    return Shard(name, heads * head_dim, first * head_dim, local * head_dim)
