"""The reference of 4-bit weights, against values that the test computes one by one."""

import itertools

import pytest
import torch

from minisgl.kernel.packed_order import in_order
from minisgl.kernel.packed_products import packed_linear, parts_of
from minisgl.kernel.packed_tilings import (
    MOST_LOADING_ROWS,
    MOST_ROWS,
    loading_tile_for,
    num_splits,
    packed_tile_for,
)
from minisgl.kernel.packed_weights import PackedKind, PackedWeights

CODES = torch.tensor([[0x10, 0x32, 0xFE, 0x98]], dtype=torch.uint8)  # 0, 1, 2, 3, 14, 15, 8, 9


def matrix(weights: PackedWeights) -> list[float]:
    """Return the only row of the matrix, by the product with the unit matrix."""
    return packed_linear(torch.eye(8), weights).flatten().tolist()


def test_symmetric_codes_have_their_zero_at_eight() -> None:
    weights = PackedWeights(PackedKind.INT4, 4, CODES, torch.tensor([[1.0, 0.5]]))
    assert matrix(weights) == [-8, -7, -6, -5, 3, 3.5, 0, 0.5]


def test_each_group_has_its_own_zero() -> None:
    zeros = torch.tensor([[1.0, 15.0]])
    weights = PackedWeights(PackedKind.INT4, 4, CODES, torch.tensor([[2.0, 1.0]]), zeros)
    assert matrix(weights) == [-2, 0, 2, 4, -1, 0, -7, -6]


def test_nvfp4_codes_are_e2m1_numbers_times_two_scales() -> None:
    scales = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    rows = torch.tensor([4.0])
    weights = PackedWeights(PackedKind.NVFP4, 4, CODES, scales, row_scales=rows)
    assert matrix(weights) == [0, 4, 8, 12, -8, -12, 0, -1]


def test_experts_are_views_of_one_tensor() -> None:
    codes, scales = CODES.expand(3, 1, 4).contiguous(), torch.ones(3, 1, 2)
    weights = PackedWeights(PackedKind.INT4, 4, codes, scales)[2]
    assert weights.codes.data_ptr() == codes[2].data_ptr()
    assert weights.scales.shape == (1, 2)


@pytest.mark.parametrize("group", [32, 64, 128, 160])
def test_the_order_of_the_kernels_has_each_code_at_its_documented_place(group: int) -> None:
    """160 columns are a chunk and a part of the next one, whose other codes are zeros."""
    codes = torch.randint(0, 16, (3, 160), dtype=torch.uint8)
    groups = -(-160 // group)
    scales, zeros = 1.0 + torch.arange(3 * groups).view(3, groups), torch.full((3, groups), 16.0)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    ordered = in_order(PackedWeights(PackedKind.INT4, group, packed, scales, zeros))
    assert ordered.codes.shape == (2, 3, 64)
    each = ordered.headers.shape[-1]
    assert each == (1 if group in (128, 160) else 4)
    words = ordered.codes.view(torch.int32)
    for row, column in itertools.product(range(3), range(160)):
        chunk, at = divmod(column, 128)
        word, step = divmod(at, 32)
        half, lane, low = step // 8, step % 8 // 2, step % 2
        found = words[chunk, row, lane * 4 + word] >> 4 * (half + 4 * low) & 15
        assert found == codes[row, column]
        header = ordered.headers[chunk, row, word * each // 4]
        halves = header.view(1).view(torch.bfloat16).tolist()
        assert halves == [-128 - 16, scales[row, column // group]]


def test_splits_of_a_product_have_chunks_and_fill_the_gpu() -> None:
    for chunks, programs in itertools.product((1, 2, 5, 32, 96), (1, 16, 96, 400)):
        tile = packed_tile_for(1, 4096)
        splits = num_splits(tile, programs, chunks)
        assert splits == 1 or splits * programs <= 132 * tile.resident
        assert (splits - 1) * -(-chunks // splits) < chunks


def test_scales_of_rows_change_in_the_headers_without_their_zeros() -> None:
    """The model scales its queries after the weights have got the order of the kernels."""
    codes, scales = torch.zeros(4, 128, dtype=torch.uint8), torch.ones(4, 2)
    ordered = in_order(PackedWeights(PackedKind.INT4, 128, codes, scales))
    ordered.scales[:, 1:3].mul_(0.5)
    assert ordered.scales[..., 0].tolist() == [[1.0, 0.5, 0.5, 1.0]] * 2
    assert ordered.headers.view(torch.bfloat16)[..., 0].eq(-136).all()


def test_gpus_with_less_shared_memory_use_small_tiles_for_many_rows() -> None:
    """A stage has the codes of the weights, 64 bytes a row, and 256 bytes for each row of x."""
    for rows, height in itertools.product(range(1, MOST_ROWS + 1), (4096, 24576)):
        tile = packed_tile_for(rows, height, large=False)
        assert tile.stages * (64 * tile.height + 256 * tile.rows) <= 99 * 1024
        assert packed_tile_for(rows, height).rows >= min(rows, 64)


def test_tiles_with_a_loading_warp_fit_into_a_multiprocessor() -> None:
    """A stage has 68 bytes a row of the weight, with the header. Triton adds 4 warps."""
    for rows, height in itertools.product(range(1, MOST_LOADING_ROWS + 1), (4096, 24576)):
        tile = loading_tile_for(rows, height)
        assert tile.stages * (68 * tile.height + 256 * tile.rows) <= 227 * 1024 - 1024
        assert tile.registers % 8 == 0
        assert 0 < tile.registers * 32 * (tile.groups * tile.warps + 4) <= 65_536
        assert tile.groups == 1 or tile.warps == 4  # a warp group for each group
        assert tile.scaled_sums or not tile.pairs


def test_parts_of_dequantised_weights_are_whole_tiles_of_the_product() -> None:
    """A part of 1,927 rows (17,408 columns in 64 MiB) left the next columns of out unaligned."""
    shapes = ((34816, 5120), (5120, 17408), (5120, 6144), (4096, 12288), (80, 640), (300, 1 << 20))
    for height, columns in shapes:
        parts = list(parts_of(height, columns))
        assert [first for first, _ in parts[1:]] == [end for _, end in parts[:-1]]
        assert (parts[0][0], parts[-1][1]) == (0, height)
        assert all(first % 256 == 0 for first, _ in parts)
        most = max(3 << 25, 512 * columns)  # one and a half times 64 MiB, or 256 rows
        assert all(2 * columns * (end - first) <= most + 512 * columns for first, end in parts)
