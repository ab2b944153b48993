"""The residual stream: folded norms compute the same, and blocks add in place on one rank."""

import pytest
import torch
from torch import Tensor

from minisgl.distributed import SingleCommunicator, TPInfo
from minisgl.kernel import PendingNorm, gated_linear, linear, rms_norm
from minisgl.layers import ColumnParallelLinear, RowParallelLinear, Shard, Stream, StreamNorm


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def filled(module: torch.nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False).normal_(1.0, 0.3, generator=generator)


def test_a_folded_norm_gives_the_same_product(generator: torch.Generator) -> None:
    norm = StreamNorm(16, 1e-5, SingleCommunicator())
    product = ColumnParallelLinear(
        16, [Shard("q_proj", 6, 0, 6), Shard("k_proj", 2, 0, 2)], bias=True
    )
    filled(norm, generator)
    filled(product, generator)
    x = torch.randn(3, 16, generator=generator)
    expected = product(norm(Stream(x))[0])
    norm.fold_into(product.weight)
    normed, residual = norm(Stream(x))
    assert normed.norm is not None
    assert normed.x is residual is x
    torch.testing.assert_close(product(normed), expected)


def test_a_folded_norm_takes_what_experts_left_beside_the_stream(
    generator: torch.Generator,
) -> None:
    norm = StreamNorm(16, 1e-5, SingleCommunicator())
    weight = torch.randn(4, 16, generator=generator)
    filled(norm, generator)
    x, residual = torch.randn(2, 3, 16, generator=generator)
    expected = linear(norm(Stream(x.clone(), residual.clone()))[0].x, weight)
    norm.fold_into(weight)
    normed, total = norm(Stream(x.clone(), residual.clone()))
    assert normed.norm is None
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(linear(normed.x, weight), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_one_rank_adds_to_the_stream_itself(generator: torch.Generator, ranks: int) -> None:
    product = RowParallelLinear(Shard("", 8, 0, 8), 16, bias=True, tp=TPInfo(0, ranks))
    filled(product, generator)
    x, before = torch.randn(3, 8, generator=generator), torch.randn(3, 16, generator=generator)
    part = torch.nn.functional.linear(x, product.weight, product.bias)
    residual = before.clone()
    stream = product(x, residual)
    if ranks == 1:
        assert stream.x is residual
        assert stream.residual is None
        torch.testing.assert_close(residual, before + part)
    else:
        assert torch.equal(stream.x, part)
        assert stream.residual is residual
        assert torch.equal(residual, before)


@pytest.mark.parametrize("norm", [None, PendingNorm(1e-5)], ids=["normed", "pending"])
def test_gated_linear_is_silu_of_the_first_half_times_the_second(
    generator: torch.Generator, norm: PendingNorm | None
) -> None:
    x = torch.randn(3, 16, generator=generator)
    weight, bias = torch.randn(10, 16, generator=generator), torch.randn(10, generator=generator)
    given: Tensor = x if norm is None else rms_norm(x, None, norm.eps)
    gate, up = torch.nn.functional.linear(given, weight, bias).chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    torch.testing.assert_close(gated_linear(x, weight, bias, None, norm), expected)
