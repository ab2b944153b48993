"""Tilings of products: they divide the shapes, fill the GPU and fit into its shared memory."""

import pytest

from minisgl.kernel.tilings import tiling_for

SHARED_MEMORY_BYTES = 227 * 1024  # of a multiprocessor of compute capability 9.0
SHAPES = [
    *((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),  # Qwen3-0.6B
    *((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)),  # 8B
    *((3584, 5120), (5120, 2560), (17408, 5120), (5120, 8704)),  # 14B on two ranks
    *((4608, 3584), (3584, 3584), (37888, 3584), (3584, 18944)),  # Qwen2.5-7B
    *((5120, 2880), (2880, 4096)),  # attention of gpt-oss-20b
]
EACH_SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=str)


@EACH_SHAPE
@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 48, 64, 65, 128, 129, 192, 256])
def test_a_tiling_fits_the_shape_and_the_gpu(shape: tuple[int, int], rows: int) -> None:
    height, width = shape
    tiling = tiling_for(rows, height, width)
    if tiling is None:
        assert rows > 32
        return
    assert tiling.rows >= min(rows, 64)
    assert height % tiling.height == 0
    assert width % (tiling.columns * tiling.splits) == 0
    part = width // tiling.splits
    assert 2 <= tiling.stages <= part // tiling.columns
    assert tiling.ahead <= part
    pieces = max(32 * tiling.warps // tiling.height, 1)
    assert tiling.ahead % (8 * pieces) == 0  # a prefetch is whole units of 16 bytes
    tiles = height // tiling.height * -(-rows // tiling.rows)
    assert tiles <= height // 8  # the number of semaphores
    assert tiles * tiling.splits >= 56
    held = 2 * tiling.columns * tiling.stages * (tiling.rows + tiling.height)
    assert held < SHARED_MEMORY_BYTES


@pytest.mark.parametrize("rows", [33, 64, 65, 128, 192, 256])
def test_our_kernel_computes_all_products_of_a_small_model(rows: int) -> None:
    """A norm is fused into a product only if all products of the layer use our kernel."""
    assert all(tiling_for(rows, *shape) for shape in SHAPES[:4])


def test_torch_computes_the_products_of_8b_with_many_rows() -> None:
    """Above 64 rows, a program would read too many bytes in some products; at 256 rows, in all."""
    few, some, many = ([tiling_for(rows, *s) for s in SHAPES[4:8]] for rows in (64, 128, 256))
    assert all(few)
    assert [tiling is None for tiling in some] == [True, False, True, False]
    assert not any(many)


@pytest.mark.parametrize(
    ("rows", "height", "width"),
    [(0, 4096, 1024), (257, 4096, 1024), (1, 1000, 1024), (1, 4096, 1000), (33, 4096, 1088)],
    ids=["no-rows", "many-rows", "odd-height", "odd-width", "many-rows-of-odd-width"],
)
def test_torch_computes_products_that_no_tiling_divides(rows: int, height: int, width: int) -> None:
    assert tiling_for(rows, height, width) is None
