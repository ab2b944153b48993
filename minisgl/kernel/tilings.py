"""How our kernels for products of few rows cut them, and which they leave to cuBLAS.

By whole chains of layers on one H200 (docs/measurements.md, "Products of a layer"). Up to 32 rows
all that counts is that memory is read without a pause. From there on each program's rows of x weigh
as much as its weights: half of the multiprocessors do as well as all of them, and better than a sum
of parts, until a program has too much to read.
"""

from typing import Final, NamedTuple


class Tiling(NamedTuple):
    """A program's rows of x, rows and columns of the weight, parts of K; loads in flight, warps.

    ahead: columns of the weight that are asked for before the kernel may start. With more than
    FEW_ROWS rows that is what all loads in flight have, whatever is said here.
    """

    rows: int
    height: int
    columns: int
    splits: int
    stages: int
    warps: int
    ahead: int


FEW_ROWS: Final = 32  # up to which one tile of rows holds them all
LOWEST_TILE: Final = 64  # rows of the weight: how many parts a row's squares come in, at most
_MULTIPROCESSORS: Final = 132
_MOST_ROWS: Final = 256
_TILES: Final = (  # and bytes that a program may read beyond 64 rows: with more, cuBLAS wins
    (Tiling(64, 64, 128, 1, 6, 4, 0), 3_200_000),
    (Tiling(64, 128, 128, 1, 4, 8, 0), 1_400_000),
    (Tiling(128, 128, 64, 1, 6, 8, 0), 1_400_000),
)
_SHORT_BYTES: Final = 200_000  # with no more, half of the multiprocessors are enough
_SHORT_TILE_BYTES: Final = 1_100_000  # the same, for the first of _TILES
_EVEN: Final = 0.7  # of the multiprocessors' time that the longest takes, at least


def tiling_for(num_rows: int, height: int, width: int) -> Tiling | None:
    """For x [num_rows, width] and a weight [height, width] on Hopper; None: cuBLAS is faster."""
    if not 0 < num_rows <= _MOST_ROWS or height % 64 or width % 128:
        return None
    if num_rows <= FEW_ROWS:
        return _few_rows(max(1 << (num_rows - 1).bit_length(), 16), height, width)
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
            return Tiling(64, 64, 64, 1, 4, 4, 0) if even else None  # three share a multiprocessor
    return None


def _few_rows(rows: int, height: int, width: int) -> Tiling:
    """Deep, or several programs on a multiprocessor where that takes all of them at once."""
    programs = height // 64
    splits, short = 1, False
    if programs <= _MULTIPROCESSORS:
        splits, short = _splits(programs, rows + 64, 128, width, _SHORT_BYTES)
    shared = -(-programs // _MULTIPROCESSORS)
    if shared == 3 and programs >= 0.9 * 3 * _MULTIPROCESSORS:
        stages = 3
    else:
        stages = 5 if short or shared == 2 else 8
    part = width // splits
    ahead = part if short else 256 if shared == 1 else 0
    return Tiling(rows, 64, 128, splits, min(stages, part // 128), 4, ahead)


def _splits(
    programs: int, lines: int, columns: int, width: int, short_bytes: int
) -> tuple[int, bool]:
    """Parts of K for one round of programs, and whether each is short.

    lines: rows of x and of the weight that a program reads; short_bytes: with no more of them, half
    of the multiprocessors are enough.
    """
    splits = 1
    for more in (1, 2, 3, 4, 6, 8):
        if programs * more > _MULTIPROCESSORS or width % (columns * more):
            continue
        splits = more
        if programs * more >= 64 and 2 * lines * width // more <= short_bytes:
            return splits, True
    return splits, False
