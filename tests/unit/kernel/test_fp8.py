"""The FP8 KV cache: the rounding of a vector, and the stored and read values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from minisgl.kernel.fp8 import dequantize, quantize, read_kv, store_kv


def rounded(x: Tensor) -> Tensor:
    return dequantize(*quantize(x), torch.float32)


@given(exponent=st.integers(-50, 100), seed=st.integers(0, 999), outlier=st.integers(0, 14))
def test_the_relative_error_of_an_element_is_at_most_a_sixteenth(
    exponent: int, seed: int, outlier: int
) -> None:
    """Elements far below the largest one are wrong by a share of the largest one."""
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(seed))
    x[:, 3] *= 2.0**outlier
    x = x * 2.0**exponent
    most = x.abs().amax(-1, keepdim=True)
    assert ((rounded(x) - x).abs() <= torch.maximum(x.abs() / 16, most / 224 * 2.0**-10)).all()


@given(exponent=st.integers(-50, 100), seed=st.integers(0, 999))
def test_rounding_a_rounded_vector_changes_nothing(exponent: int, seed: int) -> None:
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = rounded(x)
    assert torch.equal(rounded(once), once)
    assert torch.equal(once.bfloat16().float(), once), "bfloat16 holds every rounded value"


@pytest.mark.parametrize("largest", [448.0, 447.9, 449.0, 1.0, 1.75, 1.7500001, 1e4, 3e38, 1e-12])
def test_the_scale_is_the_smallest_power_of_two_that_suffices(largest: float) -> None:
    vectors, scale = quantize(torch.tensor([0.1 * largest, -largest, 0.0]))
    assert scale.log2() == scale.log2().round()
    assert vectors.float().isfinite().all()
    assert 448 * float(scale) >= largest * (1 - 2**-24)
    assert 224 * float(scale) < largest


def test_vectors_without_a_large_element() -> None:
    """Zeros, denormals and elements below the smallest scale give finite values and scales."""
    x = torch.tensor([[0.0, -0.0], [1e-45, -1e-40], [1e-25, 2e-25]])
    vectors, scales = quantize(x)
    assert scales.float().tolist() == [2.0**-60] * 3
    assert vectors.float().isfinite().all()
    assert rounded(x).abs().max() <= 2.0**-69
    assert quantize(torch.zeros(4))[0].float().tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_vector_that_is_not_finite_becomes_nan(bad: float) -> None:
    x = torch.ones(2, 8)
    x[1, 5] = bad
    found = rounded(x)
    assert found[1].isnan().all()
    assert torch.equal(found[0], x[0])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_pool_holds_rounded_vectors_and_their_scales(page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    shape = (32 // page_size, page_size, 3, 8)
    pools = torch.full((2, *shape), torch.nan).to(torch.float8_e4m3fn)
    scales = torch.full((shape[0], 3, page_size, 2), torch.nan).bfloat16()
    k, v = torch.randn(2, 11, 3, 8, generator=generator) * 300
    slots = torch.randperm(32, generator=generator)[:11].int()
    store_kv(*pools, k, v, slots, scales)
    found = read_kv(*pools, slots.view(11, 1), scales, torch.float32)
    assert torch.equal(found[0], rounded(k).unsqueeze(1))
    assert torch.equal(found[1], rounded(v).unsqueeze(1))
    others = torch.tensor([slot for slot in range(32) if slot not in slots.tolist()])
    assert all(part.isnan().all() for part in read_kv(*pools, others, scales, torch.float32))
