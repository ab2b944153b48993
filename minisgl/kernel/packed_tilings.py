"""The tiles of products with 4-bit weights, as data.

Each is the fastest of 4 to 18 tiles, with 1 to 6 programs for each multiprocessor, for the linears
of Qwen3-8B in int4 with groups of 128, on one H200 (2026-11-28, torch 2.11, Triton 3.6). A layer
takes 53 us with 1 and 16 rows, 60 with 32, 81 with 64, 128 with 128 and 230 with 256. The kernels
of bfloat16 take 102, 104, 107, 107, 121 and 157. From 512 rows on, the weights are dequantised as
fast as this kernel computes the product.
"""

from typing import Final, NamedTuple, TypeAlias


class PackedTile(NamedTuple):
    """The part of a product that a program computes.

    rows            rows of x.
    warps, repeats  rows of the weight: 16 for each warp, `repeats` times, in each group.
    stages          loads in flight, of one chunk of 128 columns each.
    resident        programs for each multiprocessor, at most. Splits of K add programs up to this.
    scaled_sums     int4 with one scale for a chunk: whether the scale multiplies the sum of the
                    chunk. Otherwise it multiplies the weights, which are then rounded.
    registers       of a thread when a program starts, in the kernel with a loading warp, which
                    takes registers from the loading warps. 0: as the compiler likes.
    pairs           with scaled_sums: whether that kernel multiplies two chunks at once.
    groups          of warps in that kernel, 1 or 2. Each has rows of the weight of its own, and all
                    have the same rows of x.
    """

    rows: int
    warps: int
    repeats: int
    stages: int
    resident: int
    scaled_sums: bool
    registers: int = 0
    pairs: bool = False
    groups: int = 1

    @property
    def height(self) -> int:
        """Rows of the weight."""
        return 16 * self.warps * self.repeats * self.groups


# For each entry: the most rows of x, the tile, and the tile of tall weights.
Tiles: TypeAlias = tuple[tuple[int, PackedTile, PackedTile], ...]

TILES: Final[Tiles] = (
    (16, PackedTile(16, 4, 1, 6, 4, True), PackedTile(16, 4, 2, 4, 3, True)),
    (32, PackedTile(32, 4, 1, 6, 3, True), PackedTile(32, 4, 1, 6, 3, True)),
    (64, PackedTile(64, 4, 1, 3, 3, True), PackedTile(64, 4, 1, 3, 3, True)),
    (128, PackedTile(64, 4, 2, 3, 2, False), PackedTile(128, 4, 2, 3, 2, False)),
    (256, PackedTile(128, 4, 1, 3, 2, False), PackedTile(128, 4, 1, 3, 2, False)),
)
# Those of the kernel with a loading warp: Hopper, int4, one scale for a chunk. Up to 64 rows, the
# fastest of 5 to 24 tiles in the same layer (2026-11-28), which takes 38 us with 1 row and 76 with
# 64. With more rows, the fastest of 13 for the sum of its products alone (2026-11-29): 112 us with
# 128 rows, 177 with 256, 301 with 512, 551 with 1,024 and 1,082 with 2,048. bfloat16 takes 124,
# 164, 278, 525 and 1,036. From 4,096 rows on, dequantised weights are faster.
_LOW: Final = PackedTile(64, 4, 1, 3, 3, False, 80)
_LOW_PAIR: Final = PackedTile(64, 4, 1, 4, 2, False, 80, groups=2)
_EVEN: Final = PackedTile(128, 4, 1, 3, 2, False, 120)
_EVEN_PAIR: Final = PackedTile(128, 4, 1, 4, 1, False, 168, groups=2)
_TALL_PAIR: Final = PackedTile(128, 4, 2, 4, 1, False, 168, groups=2)
_WIDE_PAIR: Final = PackedTile(256, 4, 1, 3, 1, False, 168, groups=2)
LOADING_TILES: Final[Tiles] = (
    (8, *2 * (PackedTile(8, 4, 1, 6, 3, True, 80, True),)),
    (16, PackedTile(16, 4, 1, 8, 3, True, 80), PackedTile(16, 4, 1, 8, 3, True, 80, True)),
    (32, PackedTile(32, 4, 1, 8, 2, True, 56), PackedTile(32, 8, 1, 6, 2, True, 80)),
    (64, PackedTile(64, 4, 1, 4, 2, False, 80), _LOW),
    (96, _LOW_PAIR, _TALL_PAIR),
    (128, PackedTile(64, 4, 1, 4, 2, False, 80), _TALL_PAIR),
    (160, _LOW_PAIR, _LOW_PAIR),
    (192, _LOW, _LOW),
    (256, _EVEN_PAIR, _EVEN_PAIR),
    (320, _LOW, _LOW_PAIR),
    (384, _EVEN, _EVEN_PAIR),
    (512, _EVEN, _WIDE_PAIR),
    (640, _TALL_PAIR, _TALL_PAIR),
    (2048, _WIDE_PAIR, _WIDE_PAIR),
)
# With more rows, the weights are dequantised for torch's product.
MOST_ROWS: Final = TILES[-1][0]
MOST_LOADING_ROWS: Final = LOADING_TILES[-1][0]
_SMALL_ROWS: Final = 64  # the tiles for more rows do not fit into 99 KiB
_MULTIPROCESSORS: Final = 132
_LEAST_CHUNKS: Final = 2  # of a split


def packed_tile_for(num_rows: int, height: int, large: bool = True) -> PackedTile:
    """The tile for x with 1 to MOST_ROWS rows and a weight with `height` rows.

    large: whether a program may have the shared memory of a program on Hopper; without, the loads
    of a tile fit into 99 KiB. Those tiles are not measured.
    """
    small = num_rows > _SMALL_ROWS and not large
    return _tile_in(TILES, _SMALL_ROWS if small else num_rows, height)


def loading_tile_for(num_rows: int, height: int) -> PackedTile:
    """The tile of the kernel with a loading warp for x with 1 to MOST_LOADING_ROWS rows."""
    return _tile_in(LOADING_TILES, num_rows, height)


def _tile_in(table: Tiles, num_rows: int, height: int) -> PackedTile:
    """A weight is tall if 64 rows of it for each multiprocessor are not all of them."""
    tile, tall = next(tiles for most, *tiles in table if num_rows <= most)
    return tall if height > 64 * _MULTIPROCESSORS else tile


def num_splits(tile: PackedTile, programs: int, chunks: int) -> int:
    """The parts of K for a product with `programs` tiles and `chunks` chunks of 128 columns."""
    wanted = tile.resident * _MULTIPROCESSORS // programs
    splits = max(min(wanted, chunks // _LEAST_CHUNKS), 1)
    # All splits but the last have equally many chunks.
    return -(-chunks // -(-chunks // splits))
