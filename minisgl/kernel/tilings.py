"""How our kernel for products of few rows cuts them."""

from typing import Final, NamedTuple


class Tiling(NamedTuple):
    """A program's rows of x, rows and columns of the weight, parts of K; loads in flight, warps.

    ahead: columns of the weight that are asked for before the kernel may start.
    """

    rows: int
    height: int
    columns: int
    splits: int
    stages: int
    warps: int
    ahead: int = 256


# By the search of docs/benchmarks.md, "Products alone": one H200, 132 multiprocessors.
_MOST_ROWS: Final = 64
_HEIGHT: Final = 64
_MANY: Final = 264  # programs: two of each multiprocessor, which then share its memory
_ENOUGH: Final = 80  # programs that read at full speed
_FEW: Final = 64  # programs that do if each has little to read
_SHORT: Final = 1024  # columns: little to read


def tiling_for(num_rows: int, height: int, width: int) -> Tiling | None:
    """For x [num_rows, width] and a weight [height, width] on Hopper; None: cuBLAS is faster."""
    if not 0 < num_rows <= _MOST_ROWS or height % _HEIGHT:
        return None
    rows = max(1 << (num_rows - 1).bit_length(), 16)
    programs = height // _HEIGHT
    many, wide = programs > _MANY, rows == _MOST_ROWS
    columns = 64 if many and wide else 128
    possible = [s for s in (1, 2, 3, 4, 6, 8) if width % (columns * s) == 0]
    if not possible:
        return None
    enough = (
        s
        for s in possible
        if programs * s >= _ENOUGH or (programs * s >= _FEW and width // s <= _SHORT)
    )
    splits = next(enough, possible[-1])
    part = width // splits
    short = part <= _SHORT
    if many:
        stages, ahead = 4 if wide else 3, 0
    else:
        stages, ahead = 5 if wide or short else 8, part if short else 256
    return Tiling(rows, _HEIGHT, columns, splits, min(stages, part // columns), 4, ahead)
