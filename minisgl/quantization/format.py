"""The FP8 formats of checkpoints, as data, and the placements of their tensors.

A checkpoint stores e4m3 weights with one scale for each tensor, for each output feature (channel)
or for each block of 128 x 128 weights. An unquantised checkpoint is converted at load (ONLINE).
In memory a tensor's scale is repeated for each row, so that merged linears keep their own scales.
"""

from collections.abc import Callable, Iterator
from functools import partial
from math import gcd
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minisgl.core import ConfigError
from minisgl.kernel.fp8_weights import FP8, Scales, quantise, row_scales
from minisgl.layers.shards import FLOATS, Placement, Shard

BLOCK = 128
_STORED = ("F8_E4M3",)


class Fp8Format(NamedTuple):
    """The storage of one quantised linear in a checkpoint.

    strategy  the part of a weight that has a scale of its own. online: the weight is unquantised
              in the checkpoint.
    scale     the name of the tensor of scales: weight_scale or weight_scale_inv. The weight is
              the stored number times the scale in both cases.
    """

    strategy: Literal["tensor", "channel", "block", "online"]
    scale: str = "weight_scale"


ONLINE = Fp8Format("online")


class Matrix(NamedTuple):
    """The matrix [rows, columns] of a rank: linears merged by rows, and its share of columns.

    outputs, inputs: as in LinearShards.
    """

    outputs: tuple[Shard, ...]
    inputs: Shard

    @property
    def rows(self) -> int:
        return sum(output.local for output in self.outputs)

    def empty(self, form: Fp8Format, *experts: int) -> tuple[Tensor, Scales]:
        """Return an empty weight [*experts, rows, columns] and its empty scales.

        A block of the checkpoint may span two ranks or two merged linears. The blocks in memory are
        then smaller, so that each lies within one rank and one linear.
        """
        columns = self.inputs.local
        unit_rows, unit_columns = 1, columns
        if form.strategy == "block":
            unit_rows, unit_columns = _unit(self.outputs), _unit((self.inputs,))
        grid = (-(-self.rows // unit_rows), -(-columns // unit_columns))
        weight = torch.empty((*experts, self.rows, columns), dtype=FP8)
        values = torch.empty((*experts, *grid), dtype=torch.float32)
        return weight, Scales(values, unit_rows, unit_columns)

    def placements(
        self,
        form: Fp8Format,
        parent: str,
        weight: str,
        scales: tuple[str, Scales],
        expert: int | None,
    ) -> Iterator[Placement]:
        """Yield the placements of the weight and its scales.

        parent: the full name of the module that has the linears. weight: the full name of the
        parameter. scales: that of the scales, and their blocks. expert: as in Placement.
        """
        offset, inputs = 0, self.inputs
        cut_columns = (inputs.begin, inputs.local) != (0, inputs.full)
        for output in self.outputs:
            source = f"{parent}.{output.name}"
            shape = (output.stored, inputs.full)
            target, values = scales
            rows = (0, *output.read)
            cut = (1, inputs.begin, inputs.end) if cut_columns else rows
            if form.strategy == "online":
                own = partial(
                    Placement,
                    f"{source}.weight",
                    shape,
                    offset=offset,
                    expert=expert,
                    stored=FLOATS,
                    order=output.order,
                )
                # A row is quantised as a whole, so that the weights do not depend on the number
                # of ranks. Rows are cut before, columns after.
                read = (None, 0, 0) if cut_columns else rows
                kept = slice(inputs.begin, inputs.end) if cut_columns else slice(None)
                yield own(weight, *read, convert=partial(_quantise_rows, columns=kept))
                yield own(target, *read, convert=row_scales)
            else:
                stored = partial(
                    Placement,
                    f"{source}.weight",
                    shape,
                    weight,
                    *cut,
                    expert=expert,
                    stored=_STORED,
                    order=output.order,
                )
                yield stored(offset=0 if cut_columns else offset)
                name = f"{source}.{form.scale}"
                yield _scale_placement(form, name, target, values, output, inputs, offset)._replace(
                    expert=expert
                )
            offset += output.local


def _scale_placement(
    form: Fp8Format,
    source: str,
    target: str,
    scales: Scales,
    output: Shard,
    inputs: Shard,
    offset: int,
) -> Placement:
    """The placement of one linear's scales. offset: its first row in the merged matrix."""
    if form.strategy == "tensor":
        repeat = partial(_repeat, rows=output.end - output.begin)
        return Placement(source, (1,), target, offset=offset, convert=repeat)
    if form.strategy == "channel":
        rows = (0, *output.read, offset)
        return Placement(
            source, (output.stored,), target, *rows, convert=_as_column, order=output.order
        )
    if output.order and BLOCK % len(output.order):
        raise ConfigError(
            f"{source}: blocks of {BLOCK} rows cannot be read with a partial rotary embedding of "
            f"heads of {len(output.order)}"
        )
    shape = (-(-output.stored // BLOCK), -(-inputs.full // BLOCK))
    dim, shard, unit = 0, output, scales.rows
    if (inputs.begin, inputs.local) != (0, inputs.full):
        dim, shard, unit, offset = 1, inputs, scales.columns, 0
    first, end, expand = _blocks(shard, dim, unit)
    return Placement(source, shape, target, dim, first, end, offset // unit, convert=expand)


def _blocks(shard: Shard, dim: int, unit: int) -> tuple[int, int, Callable[[Tensor], Tensor]]:
    """The blocks that `shard` touches (first, one past the last), and a conversion of their scales.

    The conversion repeats each scale for the smaller blocks in memory.
    """
    begin, stop = shard.read
    first, end = begin // BLOCK, -(-stop // BLOCK)
    skipped, count = (begin - first * BLOCK) // unit, -(-(stop - begin) // unit)

    def expand(part: Tensor) -> Tensor:
        return part.repeat_interleave(BLOCK // unit, dim).narrow(dim, skipped, count)

    return first, max(end, first), expand


def _unit(shards: tuple[Shard, ...]) -> int:
    """The size of blocks in memory, along the dimension of `shards`: 128 or a divisor of it."""
    if len(shards) == 1 and shards[0].local == shards[0].full:
        return BLOCK
    return gcd(BLOCK, *(shard.local for shard in shards), *(shard.shift for shard in shards))


def _quantise_rows(rows: Tensor, columns: slice) -> Tensor:
    return quantise(rows, row_scales(rows))[:, columns]


def _repeat(scale: Tensor, rows: int) -> Tensor:
    return scale.reshape(1, 1).expand(rows, 1)


def _as_column(scale: Tensor) -> Tensor:
    return scale.reshape(-1, 1)
