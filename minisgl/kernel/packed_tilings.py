"""The tiles of products with 4-bit weights, as data.

Not measured yet.
"""

from typing import Final, NamedTuple


class PackedTile(NamedTuple):
    """The part of a product that a program computes.

    rows            rows of x.
    warps, repeats  rows of the weight: 16 for each warp, `repeats` times.
    stages          loads in flight, of one chunk of 128 columns each.
    resident        programs for each multiprocessor, at most. Splits of K add programs up to this.
    scaled_sums     int4 with one scale for a chunk: whether the scale multiplies the sum of the
                    chunk. Otherwise it multiplies the weights, which are then rounded.
    """

    rows: int
    warps: int
    repeats: int
    stages: int
    resident: int
    scaled_sums: bool

    @property
    def height(self) -> int:
        """Rows of the weight."""
        return 16 * self.warps * self.repeats


# The most rows of x for which a tile is used.
TILES: Final = (
    (8, PackedTile(8, 4, 1, 4, 3, True)),
    (16, PackedTile(16, 4, 1, 4, 3, True)),
    (32, PackedTile(32, 4, 1, 4, 3, True)),
    (64, PackedTile(64, 8, 1, 4, 2, False)),
    (256, PackedTile(128, 8, 1, 3, 1, False)),
)
MOST_ROWS: Final = TILES[-1][0]  # with more, the weights are dequantised for torch's product
_MULTIPROCESSORS: Final = 132
_LEAST_CHUNKS: Final = 2  # of a split


def packed_tile_for(num_rows: int) -> PackedTile:
    """The tile for x with 1 to MOST_ROWS rows."""
    return next(tile for most, tile in TILES if num_rows <= most)


def num_splits(tile: PackedTile, programs: int, chunks: int) -> int:
    """The parts of K for a product with `programs` tiles and `chunks` chunks of 128 columns."""
    wanted = tile.resident * _MULTIPROCESSORS // programs
    splits = max(min(wanted, chunks // _LEAST_CHUNKS), 1)
    # All splits but the last have equally many chunks.
    return -(-chunks // -(-chunks // splits))
