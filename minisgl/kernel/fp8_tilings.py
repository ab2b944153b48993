"""The choice between our kernel and torch's for products with FP8 weights, as data.

Up to FEW_ROWS rows our kernel multiplies bfloat16 activations. With more rows the activations are
quantised, and torch computes the product. The values below follow from the sizes of the tiles and
from the bfloat16 tilings. They are not measured yet: `minisgl bench kernels` measures both sides
of the threshold.
"""

from typing import Final

from minisgl.kernel.tilings import LOWEST_TILE, Tiling, few_rows_tiling

FEW_ROWS: Final = 64
# Torch's product of blocks needs scales whose rows are multiples of 16 bytes.
ALIGNED_COLUMNS: Final = 512
_SHARED_BYTES: Final = 220 * 1024  # of one multiprocessor, for the stages of all its programs
_MULTIPROCESSORS: Final = 132


def fp8_tiling_for(num_rows: int, height: int, width: int, block_columns: int) -> Tiling | None:
    """The tiling for x [num_rows, width] and an FP8 weight [height, width].

    block_columns: weights of a row with the same scale. None: too many rows, or the sizes do not
    divide into tiles.
    """
    if not 0 < num_rows <= FEW_ROWS or height % LOWEST_TILE or width % 128:
        return None
    if block_columns % 32:
        return None
    rows = max(1 << (num_rows - 1).bit_length(), 16)
    tiling = few_rows_tiling(rows, height, width)
    columns = tiling.columns if block_columns >= width else min(tiling.columns, block_columns)
    shared = -(-(height // LOWEST_TILE) * tiling.splits // _MULTIPROCESSORS)
    stage = (LOWEST_TILE + 2 * rows) * columns
    stages = min(tiling.stages, max(_SHARED_BYTES // (shared * stage), 2))
    return tiling._replace(columns=columns, stages=min(stages, width // (tiling.splits * columns)))
