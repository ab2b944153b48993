"""Products with 4-bit weights, against float64 on the dequantised weights.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter.
"""

import pytest
import torch
from torch import Tensor

from minisgl.kernel.dispatch import silu_and_mul
from minisgl.kernel.packed_order import in_order
from minisgl.kernel.packed_products import packed_linear
from minisgl.kernel.packed_tilings import (
    LOADING_TILES,
    MOST_LOADING_ROWS,
    MOST_ROWS,
    TILES,
    PackedTile,
    loading_tile_for,
)
from minisgl.kernel.packed_weights import PackedKind, PackedWeights, dequantise
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.gpu.test_moe import poisoned

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 1e-2
# The kind, the columns of a group, and those of the matrix. The last groups have all columns.
FORMS = [
    (PackedKind.INT4, 128, 640),
    (PackedKind.INT4, 32, 416),
    (PackedKind.INT4, 384, 384),
    (PackedKind.NVFP4, 16, 416),
]
ROWS = [1, 5, 16] if INTERPRETED else [1, 5, 16, 33, 64, 100, MOST_ROWS, MOST_LOADING_ROWS]


def random_weights(kind: PackedKind, height: int, width: int, group: int) -> PackedWeights:
    """Weights of the order of width ** -0.5. The scales of int4 are bfloat16 numbers."""
    codes = torch.randint(0, 256, (height, width // 2), device=DEVICE, dtype=torch.uint8)
    scales = (0.5 + torch.rand(height, width // group, device=DEVICE)) * width**-0.5 / 4
    if kind is PackedKind.NVFP4:
        rows = 0.5 + torch.rand(height, device=DEVICE)
        return PackedWeights(kind, group, codes, scales.to(torch.float8_e4m3fn), None, rows)
    zeros = torch.randint(0, 17, scales.shape, device=DEVICE).to(DTYPE)
    return PackedWeights(kind, group, codes, scales.bfloat16().to(DTYPE), zeros)


def exact_product(x: Tensor, weights: PackedWeights, bias: Tensor, gated: bool) -> Tensor:
    product = x.double() @ dequantise(weights, torch.float64).T + bias.double()
    return silu_and_mul(product) if gated else product


@pytest.mark.parametrize(("kind", "group", "width"), FORMS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("gated", [False, True])
def test_products(rows: int, kind: PackedKind, group: int, width: int, gated: bool) -> None:
    """Tiles divide neither the rows nor the columns. The semaphores are zero afterwards."""
    height = 208
    weights = random_weights(kind, height, width, group)
    x, bias = normal(rows, width + 8, dtype=DTYPE)[:, :width], normal(height, dtype=DTYPE)
    semaphores = torch.zeros(height, dtype=torch.int32, device=DEVICE)

    def forward() -> Tensor:
        with poisoned():
            return packed_linear(x, in_order(weights), bias, semaphores, gated=gated)

    first = forward()
    assert error(first, exact_product(x, weights, bias, gated)) < LIMIT
    assert torch.equal(first, forward()), "a second run differs"
    assert not semaphores.any()


@pytest.mark.parametrize("tile", sorted({tile for _, *tiles in TILES for tile in tiles}), ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_tiles(tile: PackedTile, splits: int) -> None:
    """Each tile computes a product of more rows than it has, with and without splits."""
    from minisgl.kernel.triton import packed_linear as kernels

    weights = random_weights(PackedKind.INT4, 256, 1024, 128)
    rows = 3 if INTERPRETED else tile.rows + 3
    x = normal(rows, 1024, dtype=DTYPE)
    bias = normal(256, dtype=DTYPE)
    semaphores = torch.zeros(256, dtype=torch.int32, device=DEVICE)
    with poisoned():
        found = kernels.linear(x, in_order(weights), bias, semaphores, tile, splits=splits)
    assert error(found, exact_product(x, weights, bias, gated=False)) < LIMIT
    assert not semaphores.any()


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter does not run Gluon")
@pytest.mark.parametrize(
    "tile", sorted({tile for _, *tiles in LOADING_TILES for tile in tiles}), ids=str
)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("gated", [False, True])
def test_tiles_with_a_loading_warp(tile: PackedTile, splits: int, gated: bool) -> None:
    """Also rows that fill no tile, rows of the weight that fill none, and odd numbers of chunks."""
    from minisgl.kernel.triton import packed_tiles as kernels

    height, width = 656, 2688
    weights = random_weights(PackedKind.INT4, height, width, 128)
    bias = normal(height, dtype=DTYPE)
    semaphores = torch.zeros(height, dtype=torch.int32, device=DEVICE)
    for rows in (1, tile.rows + 3):
        x = normal(rows, width + 8, dtype=DTYPE)[:, :width]
        given = x, in_order(weights), bias, semaphores, tile, gated
        with poisoned():
            found = kernels.linear(*given, splits=splits)
            again = kernels.linear(*given, splits=splits)
        assert error(found, exact_product(x, weights, bias, gated)) < LIMIT
        assert torch.equal(found, again), "a second run differs"
        assert not semaphores.any()


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter does not run Gluon")
def test_a_product_with_too_few_semaphores_is_not_split() -> None:
    """Each group of warps of a tile needs a semaphore. A write past the last one would be lost."""
    from minisgl.kernel.triton import packed_tiles as kernels

    weights = random_weights(PackedKind.INT4, 656, 2688, 128)
    x, bias = normal(96, 2688, dtype=DTYPE), normal(656, dtype=DTYPE)
    tile = loading_tile_for(96, 656)
    semaphores = torch.zeros(24, dtype=torch.int32, device=DEVICE)  # 6 tiles, 2 tiles of x, groups
    given = x, in_order(weights), bias
    with poisoned():
        few = kernels.linear(*given, semaphores[:23], tile)
        whole = kernels.linear(*given, None, tile)
        split = kernels.linear(*given, semaphores, tile)
    assert tile.groups == 2
    assert torch.equal(few, whole)
    assert not torch.equal(split, whole)
    assert error(split, exact_product(x, weights, bias, gated=False)) < LIMIT
    assert not semaphores.any()


@pytest.mark.parametrize(("kind", "group", "width"), FORMS)
def test_many_rows_multiply_dequantised_weights(kind: PackedKind, group: int, width: int) -> None:
    weights = random_weights(kind, 80, width, group)
    x, bias = normal(MOST_LOADING_ROWS + 1, width, dtype=DTYPE), normal(80, dtype=DTYPE)
    with poisoned():
        found = packed_linear(x, in_order(weights), bias)
    assert error(found, exact_product(x, weights, bias, gated=False)) < LIMIT
