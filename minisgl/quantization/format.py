"""The FP8 formats of checkpoints, as data, and the placements of their tensors.

A checkpoint stores e4m3 weights with one scale for each tensor, for each output feature (channel)
or for each block of 128 x 128 weights. The strategy online converts an unquantised checkpoint at
load. In memory a tensor's scale is repeated for each row, so that merged linears keep their own
scales.
"""

from collections.abc import Iterator
from functools import partial
from math import gcd
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.fp8_weights import FP8, Scales, quantise, row_scales
from minisgl.layers.shards import FLOATS, LinearShards, Placement, Shard

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


def empty_matrix(shards: LinearShards, form: Fp8Format, *experts: int) -> tuple[Tensor, Scales]:
    """Return an empty weight [*experts, rows, columns] and its empty scales.

    A block of the checkpoint may span two ranks or two merged linears. The blocks in memory are
    then smaller, so that each lies within one rank and one linear.
    """
    rows, columns = shards.rows, shards.inputs.local
    unit_rows, unit_columns = 1, columns
    if form.strategy == "block":
        unit_rows, unit_columns = _unit(shards.outputs), _unit((shards.inputs,))
    grid = (-(-rows // unit_rows), -(-columns // unit_columns))
    weight = torch.empty((*experts, rows, columns), dtype=FP8)
    values = torch.empty((*experts, *grid), dtype=torch.float32)
    return weight, Scales(values, unit_rows, unit_columns)


def fp8_placements(
    shards: LinearShards, form: Fp8Format, name: str, targets: tuple[str, str], blocks: Scales
) -> Iterator[Placement]:
    """Yield the placements of a matrix and its scales.

    name: the full name of the method. targets: its parameters with the weight and the scales.
    blocks: the scales, as `empty_matrix` returned them.
    """
    online = form.strategy == "online"
    stored = FLOATS if online else _STORED
    weights = shards.placements(name, targets[0], source="weight", stored=stored)
    scales = shards.placements(name, targets[1], source=form.scale, per_row=True)
    for weight, scale in zip(weights, scales, strict=True):
        if online:
            # A row is quantised as a whole, so that the weights do not depend on the number of
            # ranks. Rows are cut before, columns after.
            columns, read = slice(None), weight
            if weight.dim == 1:
                columns, read = slice(weight.begin, weight.end), weight._replace(dim=None)
            yield read._replace(convert=partial(_quantise_rows, columns=columns))
            yield read._replace(target=scale.target, convert=row_scales)
        else:
            yield weight
            yield _scales_of(form, weight, scale, blocks)._replace(constant=1.0)


def _scales_of(form: Fp8Format, weight: Placement, scale: Placement, blocks: Scales) -> Placement:
    """Return the placement of one linear's scales.

    weight: the placement of its weight. scale: the placement of one scale for each row.
    """
    if form.strategy == "tensor":
        scale = scale._replace(shape=(1,), dim=None)
    if form.strategy != "block":
        return scale._replace(convert=partial(_column, rows=scale.end - scale.begin))
    dim = weight.dim or 0
    unit = (blocks.rows, blocks.columns)[dim]
    # The blocks that this rank touches, and the smaller blocks of them that it has in memory.
    first, end = weight.begin // BLOCK, -(-weight.end // BLOCK)
    skipped = (weight.begin - first * BLOCK) // unit
    count = -(-(weight.end - weight.begin) // unit)

    order = [row // unit for row in weight.order[::unit]] if _mixes_blocks(weight.order) else []

    def expand(part: Tensor) -> Tensor:
        part = part.repeat_interleave(BLOCK // unit, dim).narrow(dim, skipped, count)
        return part.view(-1, len(order), part.shape[1])[:, order].flatten(0, 1) if order else part

    shape, offset = tuple(-(-size // BLOCK) for size in weight.shape), weight.offset // unit
    return Placement(scale.source, shape, scale.target, dim, first, end, offset, convert=expand)


def _unit(shards: tuple[Shard, ...]) -> int:
    """The size of blocks in memory, along the dimension of `shards`: 128 or a divisor of it.

    A block in memory has rows of one block of the checkpoint, also if the model stores the rows in
    another order.
    """
    cuts = [cut for shard in shards if _mixes_blocks(shard.order) for cut in _cuts(shard.order)]
    if len(shards) > 1 or shards[0].local != shards[0].stored:
        cuts += [cut for shard in shards for cut in (shard.local, shard.shift)]
    return gcd(BLOCK, *cuts)


def _mixes_blocks(order: tuple[int, ...]) -> bool:
    """Whether rows of one block of the checkpoint stand in several blocks in this order."""
    return bool(order) and BLOCK % len(order) != 0


def _cuts(order: tuple[int, ...]) -> Iterator[int]:
    """Yield where each run of neighbouring rows begins, in the model and in the checkpoint."""
    for place, row in enumerate(order):
        if place == 0 or row != order[place - 1] + 1:
            yield from (place, row)


def _quantise_rows(rows: Tensor, columns: slice) -> Tensor:
    return quantise(rows, row_scales(rows))[:, columns]


def _column(scales: Tensor, rows: int) -> Tensor:
    """Return the scale of each row, [rows, 1]. scales: one for each row, or one for all."""
    return scales.reshape(-1, 1).expand(rows, 1)
