"""The formats of 4-bit weights in checkpoints, as data, and the placements of their tensors.

A format differs from others in the names, the order and the packing of its tensors. In memory all
formats are PackedWeights (kernel/packed_weights.py).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.kernel.fp8_weights import FP8
from minisgl.kernel.packed_weights import PackedKind, pack
from minisgl.layers.shards import LinearShards, Placement, Shard

# A scale of random weights, with which their deviation is that of other families' random weights.
RANDOM_SCALE = 2.0**-8
PER_WORD = 8  # codes in a word of 32 bits


class StoredTensor(NamedTuple):
    """One tensor of a matrix in the checkpoint.

    name      the last part of its name, such as qweight.
    read      converts a part of the tensor to [rows, columns or groups], one number an element.
    types     the types that the tensor may have.
    rows_at   the dimension that counts the output features: 0 or 1.
    rows      output features in an element.
    columns   input features in an element. None: those of a group.
    constant  the value of all elements in a model of random weights. None: they are drawn.
    """

    name: str
    read: Callable[[Tensor], Tensor]
    types: tuple[str, ...] = ("I32",)
    rows_at: int = 0
    rows: int = 1
    columns: int | None = None
    constant: float | None = None


class PackedFormat(NamedTuple):
    """The storage of one matrix of 4-bit weights in a checkpoint.

    name        the name of the format, for messages.
    group       columns with one scale. None: all columns of a row.
    row_scales  a tensor of one number, the scale of all rows; `read` may invert it.
    column_groups
                the name of the tensor with the group of each column, int32 [K], if a group's
                columns need not be neighbours.
    remedy      for messages: how to avoid groups that do not divide the columns.
    """

    name: str
    group: int | None
    codes: StoredTensor
    scales: StoredTensor
    zeros: StoredTensor | None = None
    row_scales: StoredTensor | None = None
    column_groups: str | None = None
    remedy: str = "use a smaller group size, or leave this module unquantised"

    @property
    def kind(self) -> PackedKind:
        return PackedKind.INT4 if self.row_scales is None else PackedKind.NVFP4

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        """The tensors with an element for each weight or group, by their names in memory."""
        zeros = {} if self.zeros is None else {"zeros": self.zeros}
        return {"codes": self.codes, "scales": self.scales, **zeros}

    def columns_of(self, shards: LinearShards) -> int:
        """Return the columns of a group on this rank. Raises ConfigError if groups do not fit."""
        columns, local = shards.inputs.stored, shards.inputs.local
        unit = self.group or PER_WORD
        if columns % unit:
            raise ConfigError(
                f"{shards.names[0]} has {columns} columns, which are not whole groups of {unit} "
                f"({self.name}): {self.remedy}"
            )
        if local % unit:
            raise ConfigError(
                f"{shards.names[0]} has {local} columns on each rank, which are not whole groups "
                f"of {unit} ({self.name}): use fewer tensor-parallel ranks"
            )
        return self.group or local

    def parameters(
        self, shards: LinearShards, dtype: torch.dtype, *experts: int
    ) -> dict[str, nn.Parameter]:
        """Return the empty parameters of a matrix by their names. dtype: of the activations."""
        rows, columns = shards.rows, shards.inputs.local
        groups = (*experts, rows, columns // self.columns_of(shards))
        is_int4 = self.kind is PackedKind.INT4
        tensors = {
            "codes": torch.empty((*experts, rows, columns // 2), dtype=torch.uint8),
            "scales": torch.empty(groups, dtype=dtype if is_int4 else FP8),
        }
        if self.zeros is not None:
            tensors["zeros"] = torch.empty(groups, dtype=dtype)
        if self.row_scales is not None:
            tensors["row_scales"] = torch.empty((*experts, rows), dtype=torch.float32)
        return {name: nn.Parameter(each, requires_grad=False) for name, each in tensors.items()}

    def placements(self, shards: LinearShards, target: str) -> Iterator[Placement]:
        """Yield the placements of a matrix. target: the beginning of the parameters' full names."""
        offset = 0
        for output, linear in zip(shards.outputs, shards.names, strict=True):
            for parameter, tensor in self.tensors.items():
                placed = self._place(tensor, output, shards, linear)
                convert = partial(
                    _in_memory, tensor=tensor, output=output, packs=parameter == "codes"
                )
                yield placed._replace(target=target + parameter, offset=offset, convert=convert)
            if (scale := self.row_scales) is not None:
                yield Placement(
                    f"{linear}.{scale.name}",
                    (1,),
                    f"{target}row_scales",
                    offset=offset,
                    convert=partial(_for_rows, read=scale.read, rows=output.end - output.begin),
                    constant=scale.constant,
                )
            offset += output.local

    def _place(
        self, tensor: StoredTensor, output: Shard, shards: LinearShards, linear: str
    ) -> Placement:
        """Return the part of a tensor that this rank reads. Raises ConfigError."""
        inputs = shards.inputs
        columns = tensor.columns or self.group or inputs.stored
        cuts_columns = (inputs.read[0], inputs.local) != (0, inputs.stored)
        (begin, end), unit = (inputs.read, columns) if cuts_columns else (output.read, tensor.rows)
        total = inputs.stored if cuts_columns else output.stored
        if unit < total and (begin % unit or (end % unit and end < total)):
            raise ConfigError(
                f"{linear}.{tensor.name} packs {unit} rows in an element, and a rank cannot read "
                f"the rows {begin} to {end} of {total}: use fewer tensor-parallel ranks"
            )
        shape = -(-output.stored // tensor.rows), -(-inputs.stored // columns)
        return Placement(
            f"{linear}.{tensor.name}",
            shape[::-1] if tensor.rows_at else shape,
            "",
            dim=tensor.rows_at ^ cuts_columns,
            begin=begin // unit,
            end=-(-end // unit) if begin < end else begin // unit,
            along=0,
            stored=tensor.types,
            constant=tensor.constant,
        )


def _in_memory(part: Tensor, tensor: StoredTensor, output: Shard, packs: bool) -> Tensor:
    """Return the numbers of this rank's rows in the order of the model."""
    numbers = tensor.read(part)[: output.end - output.begin]
    if output.order:
        groups = numbers.view(-1, len(output.order), numbers.shape[1])
        numbers = groups[:, list(output.order)].flatten(0, 1)
    return pack(numbers) if packs else numbers


def _for_rows(scale: Tensor, read: Callable[[Tensor], Tensor], rows: int) -> Tensor:
    return read(scale.float()).reshape(1).expand(rows)


def group_of(size: int) -> int | None:
    """Return the columns of a group from group_size, where -1 means all. Raises ConfigError."""
    if size != -1 and (size <= 0 or size % PER_WORD):
        raise ConfigError(
            f"quantization_config: group_size {size} is not supported; supported: -1 and "
            f"multiples of {PER_WORD}"
        )
    return None if size == -1 else size


def as_stored(numbers: Tensor) -> Tensor:
    return numbers


def transposed(numbers: Tensor) -> Tensor:
    return numbers.T


def from_words(words: Tensor, dim: int, order: tuple[int, ...] = tuple(range(PER_WORD))) -> Tensor:
    """Return the codes of int32 words, uint8, as neighbours along `dim` [0 or 1].

    order: the place in the word, from the low bits, of each of its 8 codes.
    """
    codes = torch.stack([(words >> 4 * place & 15).to(torch.uint8) for place in order], dim + 1)
    return codes.flatten(dim, dim + 1)
