"""The residual stream: a folded norm changes no result, and one rank adds to it in place."""

import pytest
import torch
from torch import Tensor

from minisgl.distributed.comm import SingleCommunicator, TPInfo
from minisgl.kernel.dispatch import linear, rms_norm
from minisgl.kernel.elementwise import PendingNorm
from minisgl.layers.linear import (
    ColumnParallelLinear,
    LinearBuild,
    RowParallelLinear,
    UnquantizedLinear,
)
from minisgl.layers.norm import ResidualNorm, ResidualStream
from minisgl.layers.shards import Shard


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def filled(module: torch.nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        parameter.requires_grad_(False).normal_(1.0, 0.3, generator=generator)


def norm_and_linear(generator: torch.Generator) -> tuple[ResidualNorm, ColumnParallelLinear]:
    norm = ResidualNorm(16, 1e-5, SingleCommunicator())
    outputs = (Shard("q_proj", 6, 0, 6), Shard("k_proj", 2, 0, 2))
    build = LinearBuild(TPInfo(0, 1), torch.float32, UnquantizedLinear)
    linear = ColumnParallelLinear(16, outputs, True, build)
    filled(norm, generator)
    filled(linear, generator)
    return norm, linear


def test_a_folded_norm_gives_the_same_product(generator: torch.Generator) -> None:
    norm, linear = norm_and_linear(generator)
    x = torch.randn(3, 16, generator=generator)
    expected = linear(norm(ResidualStream(x))[0])
    norm.fold_with(linear.method.fold)
    block_input, residual = norm(ResidualStream(x))
    assert block_input.norm is not None
    assert block_input.x is residual is x
    torch.testing.assert_close(linear(block_input), expected)


def test_a_folded_norm_adds_up_a_stream_in_two_parts(generator: torch.Generator) -> None:
    """A MoE block, or a linear that leaves the sum to the norm, returns two parts."""
    norm, linear = norm_and_linear(generator)
    x, residual = torch.randn(2, 3, 16, generator=generator)
    expected = linear(norm(ResidualStream(x.clone(), residual.clone()))[0])
    norm.fold_with(linear.method.fold)
    block_input, total = norm(ResidualStream(x.clone(), residual.clone()))
    assert block_input.norm is not None
    torch.testing.assert_close(linear(block_input), expected)
    assert torch.equal(total, x + residual), "the linear adds in place"


@pytest.mark.parametrize("ranks", [1, 2])
def test_only_a_single_rank_adds_to_the_residual_in_place(
    generator: torch.Generator, ranks: int
) -> None:
    build = LinearBuild(TPInfo(0, ranks), torch.float32, UnquantizedLinear)
    linear = RowParallelLinear(Shard("o_proj", 8, 0, 8), 16, True, build)
    filled(linear, generator)
    x, before = torch.randn(3, 8, generator=generator), torch.randn(3, 16, generator=generator)
    part = linear.method.product(x)
    residual = before.clone()
    stream = linear(x, residual)
    if ranks == 1:
        assert stream.x is residual
        assert stream.residual is None
        torch.testing.assert_close(residual, before + part)
    else:
        assert torch.equal(stream.x, part)
        assert stream.residual is residual
        assert torch.equal(residual, before)


@pytest.mark.parametrize("norm", [None, PendingNorm(1e-5)], ids=["normalised", "pending"])
def test_gated_linear_is_silu_of_the_first_half_times_the_second(
    generator: torch.Generator, norm: PendingNorm | None
) -> None:
    x = torch.randn(3, 16, generator=generator)
    weight, bias = torch.randn(10, 16, generator=generator), torch.randn(10, generator=generator)
    given: Tensor = x if norm is None else rms_norm(x, None, norm.eps)
    gate, up = torch.nn.functional.linear(given, weight, bias).chunk(2, dim=-1)
    expected = gate * gate.sigmoid() * up
    torch.testing.assert_close(linear(x, weight, bias, None, norm, gated=True), expected)
