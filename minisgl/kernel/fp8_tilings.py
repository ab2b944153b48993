"""The choice between our kernel and torch's for products with FP8 weights, as data.

Up to EXACT_ROWS rows our kernel multiplies bfloat16 activations. With more rows the activations are
quantised. Our kernel computes their products up to MOST_ROWS rows, unless torch's is faster: above
64 rows it is, if the tiles of our kernel need a second wave of programs. The rules were measured
with whole chains of layers on one H200 (bench/notebook/2026-11-23-fp8.md).
"""

from typing import Final

from minisgl.kernel.tilings import LOWEST_TILE, Tiling

EXACT_ROWS: Final = 8
MOST_ROWS: Final = 256
GROUP: Final = 128  # columns of x with the same scale, if the weight has scales of blocks
# Torch's product of blocks needs scales whose rows are multiples of 16 bytes.
ALIGNED_COLUMNS: Final = 512
_MULTIPROCESSORS: Final = 132
_SHARED_BYTES: Final = 222 * 1024  # of one multiprocessor, for the stages of all its programs
_MOST_RESIDENT: Final = 3  # programs that run on one multiprocessor at the same time
_COLUMNS: Final = 256  # of one step over K, unless the blocks of the weight are smaller
_LONG: Final = 8192  # from this many columns on, or with 64 rows, splitting a tile saves time


def fp8_tiling_for(
    num_rows: int, height: int, width: int, block_columns: int, torch_multiplies: bool = True
) -> Tiling | None:
    """The tiling for x [num_rows, width] and an FP8 weight [height, width].

    block_columns: weights of a row with the same scale. torch_multiplies: whether torch has a
    kernel for this product. None: torch's is faster, or the sizes do not divide into tiles.
    """
    if not 0 < num_rows <= MOST_ROWS or height % LOWEST_TILE or width % 128:
        return None
    groups_differ = block_columns < width and block_columns != GROUP
    if groups_differ and (num_rows > EXACT_ROWS or block_columns % 32):
        return None
    tiles, most_columns = height // LOWEST_TILE, min(block_columns, _COLUMNS)
    if num_rows <= EXACT_ROWS:
        return _exact(tiles, width, most_columns)
    if num_rows > 64 and tiles > _MULTIPROCESSORS and torch_multiplies:
        return None
    if num_rows > 128 and -(-num_rows // 128) * tiles > _MULTIPROCESSORS:
        return None
    return _quantised(num_rows, tiles, width, most_columns)


def _exact(tiles: int, width: int, columns: int) -> Tiling:
    """The tiling for bfloat16 activations.

    Split-K adds programs up to three on each multiprocessor.
    """
    splits = 1
    for more in (2, 3, 4):
        if tiles * more <= _MOST_RESIDENT * _MULTIPROCESSORS and width % (128 * more) == 0:
            splits = more
    if width % (columns * splits):
        columns = min(columns, 128)
    few = tiles * splits <= 2 * _MULTIPROCESSORS
    stages = (4 if few else 3) if columns == _COLUMNS else 6
    stages = max(min(stages, width // (splits * columns)), 2)
    return Tiling(EXACT_ROWS, LOWEST_TILE, columns, splits, stages, 4, 256 if few else 0)


def _quantised(num_rows: int, tiles: int, width: int, columns: int) -> Tiling:
    """The tiling for quantised activations."""
    rows = min(max(1 << (num_rows - 1).bit_length(), 16), 64)
    programs = tiles * -(-num_rows // rows)
    if programs > _MULTIPROCESSORS and num_rows > rows:
        rows, programs = 128, tiles * -(-num_rows // 128)
    splits = 1
    if 2 * programs <= _MULTIPROCESSORS and width % 256 == 0 and (width >= _LONG or rows == 64):
        splits = 2
    resident = min(-(-programs * splits // _MULTIPROCESSORS), _MOST_RESIDENT)
    if rows == 128 or (rows == 64 and resident > 1) or width % (columns * splits):
        columns = min(columns, 128)
    stages = _SHARED_BYTES // (resident * (rows + LOWEST_TILE) * columns)
    stages = max(min(stages, 7, width // (splits * columns)), 2)
    ahead = 256 if rows <= 32 and resident == 1 else 0
    return Tiling(rows, LOWEST_TILE, columns, splits, stages, 4, ahead)
