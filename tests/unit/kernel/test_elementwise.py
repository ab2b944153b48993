"""The references of the layers' kernels against their definitions."""

import math

import pytest
import torch
from torch.nn import functional

from minisgl.kernel.dispatch import (
    add_linear,
    add_rms_norm,
    add_sinks,
    gather_embedding,
    multiply_sigmoid,
    rms_norm,
    silu_and_mul,
)
from minisgl.kernel.elementwise import gelu_and_mul, rope
from minisgl.kernel.fp8 import store_kv
from minisgl.kernel.ssd import gated_group_norm


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_rms_norm_equals_its_definition(generator: torch.Generator) -> None:
    x, weight = torch.randn(3, 5, 16, generator=generator), torch.rand(16, generator=generator)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.float())


def test_rms_norm_rounds_its_result_once(generator: torch.Generator) -> None:
    x, weight = torch.randn(64, 96, generator=generator), torch.rand(96, generator=generator)
    x, weight = x.bfloat16(), weight.bfloat16()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.equal(rms_norm(x, weight, 1e-5), exact.bfloat16())


def test_gated_group_norm_rounds_its_result_once(generator: torch.Generator) -> None:
    x, gate, weight = torch.randn(3, 64, 96, generator=generator).bfloat16()
    opened = (x.double() * functional.silu(gate.double())).view(64, 4, 24)
    normed = opened * (opened.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    exact = normed.flatten(1) * weight[0].double()
    assert torch.equal(gated_group_norm(x, weight[0], gate, 4, 1e-5), exact.bfloat16())


def test_add_rms_norm_returns_norm_and_sum(generator: torch.Generator) -> None:
    x, residual = torch.randn(2, 4, 8, generator=generator)
    weight = torch.rand(8, generator=generator)
    expected = x + residual
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert total is residual
    assert torch.equal(total, expected)
    assert torch.equal(normed, rms_norm(expected, weight, 1e-6))


@pytest.mark.parametrize("biased", [False, True])
def test_add_linear_adds_in_place(generator: torch.Generator, biased: bool) -> None:
    x, weight = torch.randn(3, 8, generator=generator), torch.randn(5, 8, generator=generator)
    residual = torch.randn(3, 5, generator=generator)
    bias = torch.randn(5, generator=generator) if biased else None
    expected = residual + torch.nn.functional.linear(x, weight, bias)
    total, squares = add_linear(residual, x, weight, bias)
    assert total is residual
    assert squares is None
    torch.testing.assert_close(residual, expected)


def test_silu_and_mul_takes_the_gate_first() -> None:
    out = silu_and_mul(torch.tensor([[1.0, -2.0, 3.0, 5.0]]))
    expected = [[1 / (1 + math.exp(-1)) * 3, -2 / (1 + math.exp(2)) * 5]]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_gelu_and_mul_takes_the_gate_first() -> None:
    out = gelu_and_mul(torch.tensor([[1.0, -2.0, 3.0, 5.0]]))
    halves = [math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)) for g in (1.0, -2.0)]
    expected = [[0.5 * (1 + halves[0]) * 3, -(1 + halves[1]) * 5]]
    torch.testing.assert_close(out, torch.tensor(expected))


def test_multiply_sigmoid_changes_its_first_argument() -> None:
    x, gate = torch.tensor([[6.0, -2.0]]), torch.tensor([[0.0, math.log(3)]])
    assert multiply_sigmoid(x, gate) is x
    torch.testing.assert_close(x, torch.tensor([[3.0, -1.5]]))


def test_rope_rotates_pairs_of_halves(generator: torch.Generator) -> None:
    q, k = torch.randn(2, 3, 2, 4, generator=generator)
    angles = torch.rand(10, 2, generator=generator)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([7, 0, 9], dtype=torch.int32)
    for x, turned in zip((q, k), rope(q, k, positions, table), strict=True):
        pairs = torch.complex(x[..., :2], x[..., 2:])
        spin = torch.polar(torch.ones(3, 1, 2), angles[positions].unsqueeze(1))
        expected = pairs * spin
        torch.testing.assert_close(turned, torch.cat((expected.real, expected.imag), dim=-1))


def test_store_kv_writes_slots_only(generator: torch.Generator) -> None:
    k_pool, v_pool = torch.zeros(2, 4, 2, 3, 5)
    k, v = torch.randn(2, 3, 3, 5, generator=generator)
    store_kv(k_pool, v_pool, k, v, torch.tensor([7, 0, 4], dtype=torch.int32))
    assert torch.equal(k_pool[3, 1], k[0])
    assert torch.equal(v_pool[2, 0], v[2])
    assert k_pool.count_nonzero() == k.count_nonzero()


def test_gather_embedding_parts_sum_to_the_whole(generator: torch.Generator) -> None:
    weight = torch.randn(10, 4, generator=generator)
    ids = torch.tensor([0, 9, 5, 4], dtype=torch.int32)
    parts = [gather_embedding(ids, weight[first : first + 5], first) for first in (0, 5)]
    assert torch.equal(parts[0] + parts[1], weight[ids.long()])
    assert not parts[0][1].any()


def test_gather_embedding_takes_negative_ids_from_the_image_buffer(
    generator: torch.Generator,
) -> None:
    weight = torch.randn(10, 4, generator=generator)
    buffer = torch.randn(3, 8, generator=generator)
    ids = torch.tensor([0, ~2, 9, ~0], dtype=torch.int32)
    owner = gather_embedding(ids, weight[:5], 0, buffer[:, :4])
    other = gather_embedding(ids, weight[5:], 5)
    assert torch.equal(owner[[1, 3]], buffer[[2, 0], :4])
    assert not other[[0, 1, 3]].any()
    assert torch.equal((owner + other)[[0, 2]], weight[[0, 9]])


def test_sinks_take_a_share_of_the_softmax(generator: torch.Generator) -> None:
    scores = torch.randn(7, 3, 5, generator=generator) * 4
    values = torch.randn(5, 2, generator=generator)
    sinks = torch.tensor([-100.0, 0.5, 100.0])
    out = scores.softmax(-1) @ values
    add_sinks(out, scores.logsumexp(-1) / math.log(2), sinks)
    with_sinks = torch.cat((scores, sinks.expand(7, 3).unsqueeze(2)), dim=-1)
    torch.testing.assert_close(out, with_sinks.softmax(-1)[..., :5] @ values)
    assert out[:, 2].abs().max() < 1e-30
