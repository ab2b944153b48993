"""The tile sizes of our matrix products of few rows, and the products that cuBLAS computes faster.

The rules were measured with whole chains of layers on one H200
(bench/notebook/2026-11-22-kernels.md). Up to 32 rows, a product is fast if the GPU reads the
weights without a pause. With more rows, a program reads about as many bytes of x as of the weight.
Half of the multiprocessors with one program each are then as fast as all of them with one program
each, and faster than all of them with split-K. This holds up to a limit on the bytes that a program
reads.
"""

from functools import lru_cache
from typing import Final, NamedTuple


class Tiling(NamedTuple):
    """The division of a product x [M, K] @ weight [N, K].T into programs.

    rows     rows of x that a program multiplies.
    height   rows of the weight that a program multiplies.
    columns  columns of both that a program loads at once.
    splits   parts of K, each of which is a program of its own.
    stages   loads in flight.
    warps    warps of a program.
    ahead    columns of the weight that a program prefetches while the kernel before it still runs.
             Used up to FEW_ROWS rows. With more rows, a program fills all its stages with weights
             during that time.
    """

    rows: int
    height: int
    columns: int
    splits: int
    stages: int
    warps: int
    ahead: int


FEW_ROWS: Final = 32  # up to this many rows of x fit into one tile
# A program sums the squares of x itself for up to this many rows and columns. It holds them in
# registers while it multiplies.
SUMMED_ROWS: Final = 4
_SUMMED_COLUMNS: Final = 4096
LOWEST_TILE: Final = 64  # smallest height; a row of N outputs has at most N / 64 partial squares
_MULTIPROCESSORS: Final = 132
_MOST_ROWS: Final = 256
# With more than 64 rows of x, cuBLAS is faster if a program would read more bytes than this limit.
_TILES: Final = (
    (Tiling(64, 64, 128, 1, 6, 4, 0), 3_200_000),
    (Tiling(64, 128, 128, 1, 4, 8, 0), 1_400_000),
    (Tiling(128, 128, 64, 1, 6, 8, 0), 1_400_000),
)
# Half of the multiprocessors are enough if a program reads at most this many bytes. The first limit
# is for at most FEW_ROWS rows of x, the second for the first entry of _TILES.
_SHORT_BYTES: Final = 200_000
_SHORT_TILE_BYTES: Final = 1_100_000
# In a round each multiprocessor runs at most one program. On average over all rounds, at least this
# share of the multiprocessors must run one.
_EVEN: Final = 0.7


def sums_squares(num_rows: int, width: int) -> bool:
    """Whether a product of few rows sums the squares of x [num_rows, width] for a norm itself."""
    return num_rows <= SUMMED_ROWS and width <= _SUMMED_COLUMNS


@lru_cache(maxsize=4096)  # each product calls this; a model has few sizes
def tiling_for(num_rows: int, height: int, width: int) -> Tiling | None:
    """The tiling for x [num_rows, width] and a weight [height, width] on Hopper.

    None if cuBLAS is faster or the sizes do not divide into tiles.
    """
    if not 0 < num_rows <= _MOST_ROWS or height % 64 or width % 64:
        return None
    if num_rows > FEW_ROWS and width % 128:
        return None
    if num_rows <= FEW_ROWS:
        return _few_rows_tiling(max(1 << (num_rows - 1).bit_length(), 16), height, width)
    for tile, most_bytes in _TILES:
        programs = height // tile.height * -(-num_rows // tile.rows)
        if programs <= _MULTIPROCESSORS and height % tile.height == 0:
            lines, enough = tile.rows + tile.height, _SHORT_TILE_BYTES if tile.height == 64 else 0
            splits, short = _splits(programs, lines, tile.columns, width, enough)
            if num_rows > 64 and 2 * lines * width // splits > most_bytes:
                return None
            even = short or programs * splits >= _EVEN * _MULTIPROCESSORS
            stages = min(tile.stages, width // (splits * tile.columns))
            return tile._replace(splits=splits, stages=stages) if even else None
        if num_rows <= 64:
            rounds = -(-programs // _MULTIPROCESSORS)
            even = programs >= _EVEN * _MULTIPROCESSORS * rounds
            return Tiling(64, 64, 64, 1, 4, 4, 0) if even else None  # 3 per multiprocessor
    return None


def _few_rows_tiling(rows: int, height: int, width: int) -> Tiling:
    """The tiling for up to FEW_ROWS rows.

    A program that has a multiprocessor for itself gets 8 stages, or 5 if half of the
    multiprocessors are enough. If two programs share a multiprocessor, each gets 5. If nearly all
    multiprocessors have three programs, each gets 3. In all other cases a program gets 8. If 128
    does not divide the width, a stage has 64 columns, and there are twice as many stages. The
    stages of this case have not been measured yet.
    """
    programs = height // 64
    columns = 128 if width % 128 == 0 else 64
    splits, short = 1, False
    if programs <= _MULTIPROCESSORS:
        splits, short = _splits(programs, rows + 64, columns, width, _SHORT_BYTES)
    shared = -(-programs // _MULTIPROCESSORS)
    if shared == 3 and programs >= 0.9 * 3 * _MULTIPROCESSORS:
        stages = 3
    else:
        stages = 5 if short or shared == 2 else 8
    part = width // splits
    ahead = part if short else 256 if shared == 1 else 0
    stages = min(stages * 128, part) // columns
    return Tiling(rows, 64, columns, splits, stages, 4, ahead)


def _splits(
    programs: int, lines: int, columns: int, width: int, short_bytes: int
) -> tuple[int, bool]:
    """The number of parts of K, such that all programs run at once, and whether a part is short.

    lines: rows of x and of the weight, together, that a program reads.
    short_bytes: a part is short if a program reads no more than this; half of the multiprocessors
    are then enough.
    """
    splits = 1
    for more in (1, 2, 3, 4, 6, 8):
        if programs * more > _MULTIPROCESSORS or width % (columns * more):
            continue
        splits = more
        if programs * more >= 64 and 2 * lines * width // more <= short_bytes:
            return splits, True
    return splits, False
