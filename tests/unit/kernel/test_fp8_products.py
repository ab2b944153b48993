"""FP8 products on the CPU: dequantising, quantised rows, and the choice of tiles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.kernel.dispatch import silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_products import fp8_add_linear, fp8_linear, quantise_rows
from minisgl.kernel.fp8_tilings import EXACT_ROWS, GROUP, MOST_ROWS, fp8_tiling_for
from minisgl.kernel.fp8_weights import FP8, LARGEST, Scales, dequantise, quantise, row_scales


def test_each_weight_gets_the_scale_of_its_block() -> None:
    weight = torch.ones(2, 5, 7).to(FP8)
    values = torch.arange(12.0).view(2, 2, 3)
    wide = dequantise(weight, Scales(values, 3, 3), torch.float32)
    for expert, row, column in ((0, 0, 0), (0, 2, 6), (1, 3, 2), (1, 4, 6)):
        assert wide[expert, row, column] == values[expert, row // 3, column // 3]


def silu_x(x: torch.Tensor) -> torch.Tensor:
    return x * x.sigmoid() * x


def test_the_products_are_those_of_the_dequantised_weights() -> None:
    torch.manual_seed(0)
    weight, values = torch.randn(8, 6).to(FP8), torch.rand(8, 1)
    scales, x, bias = Scales(values, 1, 6), torch.randn(3, 6), torch.randn(8)
    norm_weight = torch.rand(6)
    wide = weight.float() * values
    torch.testing.assert_close(fp8_linear(x, weight, scales, bias), x @ wide.T + bias)
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * norm_weight
    found = fp8_linear(x, weight, scales, bias, None, PendingNorm(1e-6), norm_weight, gated=True)
    torch.testing.assert_close(found, silu_and_mul(normed @ wide.T + bias))
    torch.testing.assert_close(
        fp8_linear(x, weight, scales, None, None, None, norm_weight), (x * norm_weight) @ wide.T
    )
    both = fp8_linear(x, weight, scales, bias, gated=True, leave_gate=True)
    torch.testing.assert_close(both, x @ wide.T + bias)
    torch.testing.assert_close(fp8_linear(torch.cat((x, x), 1), weight, scales), silu_x(x) @ wide.T)


def test_the_next_product_adds_a_product_to_the_residual() -> None:
    weight, values = torch.randn(8, 8).to(FP8), torch.rand(8, 1)
    scales, x, residual = Scales(values, 1, 8), torch.randn(3, 8), torch.randn(3, 8)
    dense, before = weight.float() * values, residual.clone()
    product, rest, squares = fp8_add_linear(residual, x, weight, scales)
    assert rest is residual
    assert squares is None
    torch.testing.assert_close(product, x @ dense.T)
    norm_weight, total = torch.rand(8), before + product
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6)
    norm = PendingNorm(1e-6, addend=product)
    found = fp8_linear(residual, weight, scales, None, None, norm, norm_weight)
    torch.testing.assert_close(found, (normed * norm_weight) @ dense.T)
    assert torch.equal(residual, total), "later layers read the sum"
    stored, found_scales = quantise_rows(before, False, PendingNorm(1e-6, addend=product.clone()))
    torch.testing.assert_close(stored.float() * found_scales, normed, atol=0.1, rtol=0.07)
    assert torch.equal(before, total)


@given(st.integers(1, 5), st.integers(1, 300), st.booleans(), st.integers(0, 2**31))
def test_quantised_rows_are_within_half_a_step(
    rows: int, width: int, grouped: bool, seed: int
) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * 7
    stored, scales = quantise_rows(x, grouped)
    assert stored.shape == x.shape
    assert scales.shape == (rows, -(-width // 128) if grouped else 1)
    wide = scales.repeat_interleave(128 if grouped else width, 1)[:, :width]
    step = (x.abs() / 16).clamp_min(0) + wide * 2**-10
    assert ((stored.float() * wide - x).abs() <= step * 1.001).all()


def test_a_row_of_zeros_stays_zero() -> None:
    zeros = torch.zeros(2, 9)
    assert (quantise(zeros, row_scales(zeros)).float() == 0).all()
    x = torch.tensor([[1e30, -1e30, 1.0]])
    assert quantise(x, row_scales(x)).float().tolist() == [[LARGEST, -LARGEST, 0.0]]


@pytest.mark.parametrize("columns", [4096, 128, 64, 32])
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256])
def test_tiles_divide_the_weight_and_its_blocks(rows: int, columns: int) -> None:
    shapes = ((6144, 4096), (24576, 4096), (4096, 12288), (5120, 17408), (1536, 1024), (1024, 384))
    for height, width in shapes:
        tiling = fp8_tiling_for(rows, height, width, width if columns == 4096 else columns)
        if rows > EXACT_ROWS and columns < GROUP:
            assert tiling is None
            continue
        if tiling is None:
            assert rows > 64
            assert height * -(-rows // 128) > 132 * 64, "torch is faster for more than 132 tiles"
            forced = fp8_tiling_for(rows, height, width, GROUP, torch_multiplies=False)
            assert (forced is None) == (rows > 128)
            continue
        assert tiling.rows >= min(rows, 64)
        if rows > 128:
            assert height // tiling.height * -(-rows // tiling.rows) <= 132
        assert height % tiling.height == width % (tiling.columns * tiling.splits) == 0
        assert 2 <= tiling.stages <= max(2, width // (tiling.columns * tiling.splits))
        assert columns % tiling.columns == 0
        exact = rows <= EXACT_ROWS
        stage = (tiling.height + (2 if exact else 1) * tiling.rows) * tiling.columns
        copies = 2 * tiling.rows * tiling.columns if exact else 0
        assert tiling.stages * stage + copies <= 227 * 1024


def test_products_without_tiles() -> None:
    assert fp8_tiling_for(MOST_ROWS + 1, 4096, 4096, 4096) is None
    assert fp8_tiling_for(1, 100, 4096, 4096) is None
    assert fp8_tiling_for(1, 4096, 100, 100) is None
    assert fp8_tiling_for(1, 4096, 4096, 16) is None
