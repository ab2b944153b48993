"""The reference of 4-bit weights, against values that the test computes one by one."""

import torch

from minisgl.kernel.packed_weights import PackedKind, PackedWeights, packed_linear

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
