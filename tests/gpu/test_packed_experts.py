"""Experts in int4, against float64 on the dequantised weights.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter.
"""

import pytest
import torch

from minisgl.kernel.activation import Activation
from minisgl.kernel.dispatch import silu_and_mul
from minisgl.kernel.packed_order import dequantise as dequantise_ordered
from minisgl.kernel.packed_order import in_order
from minisgl.kernel.packed_weights import PackedKind, PackedWeights, dequantise
from minisgl.moe.base import ExpertMatrix, ExpertWeights, route
from minisgl.moe.triton_backend import TritonMoe
from tests.gpu.test_fp8_experts import few_programs as few_programs
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.gpu.test_moe import poisoned
from tests.gpu.test_mxfp4_moe import DTYPE, LIMIT, router_of
from tests.gpu.test_packed_weights import random_weights

# Tokens, experts, the widths of tokens and of experts, and the columns of a group.
SHAPES = [
    (1, 4, 128, 64, 32),
    (2, 3, 128, 640, 128),
    (3, 5, 384, 128, 128),
    (5, 8, 160, 96, 32),
    (20, 4, 256, 128, 128),
]
if not INTERPRETED:
    SHAPES += [(1, 64, 2048, 512, 128), (64, 32, 2048, 512, 128), (600, 8, 1024, 768, 64)]
    SHAPES += [(4000, 4, 512, 512, 128)]


def matrices(experts: int, height: int, width: int, group: int) -> PackedWeights:
    each = [random_weights(PackedKind.INT4, height, width, group) for _ in range(experts)]
    codes, scales = (
        torch.stack([getattr(one, name) for one in each]) for name in ("codes", "scales")
    )
    zeros = torch.stack([one.zeros for one in each if one.zeros is not None])
    return PackedWeights(PackedKind.INT4, group, codes, scales, zeros)


@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize(("tokens", "experts", "width", "inner", "group"), SHAPES)
def test_experts(
    tokens: int, experts: int, width: int, inner: int, group: int, shared: int
) -> None:
    """Tiles divide neither the sizes nor the blocks of tokens. The last expert may be shared."""
    check_experts(tokens, experts, width, inner, group, shared)


@pytest.mark.parametrize("tokens", [1, 2])
def test_experts_with_more_columns_than_a_program_loads_at_once(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three turns, the last of which is not full, for gate and up and for down."""
    from minisgl.kernel.triton import int4_few

    parts = 8 // int4_few._ROWS, 16 // int4_few._DOWN_ROWS
    monkeypatch.setattr(int4_few, "_COLUMNS", 128 * parts[0])
    check_experts(tokens, 3, 256 * parts[0] + 32, 256 * parts[1] + 32, 32, 1)


def check_experts(
    tokens: int, experts: int, width: int, inner: int, group: int, shared: int
) -> None:
    """Compare the experts of random int4 weights with float64. Two calls must be equal."""
    gate_up = matrices(experts, 2 * inner, width, group)
    down = matrices(experts, width, inner, group)
    router = router_of(experts, width)._replace(bias=None, shared=shared)
    x = normal(tokens, width, dtype=DTYPE)
    ordered = [in_order(one) for one in (gate_up, down)]
    weights = ExpertWeights(*(ExpertMatrix(one.codes, one) for one in ordered))
    factors, chosen = route(torch.nn.functional.linear(x, router.weight), router)
    wide = [dequantise(one, torch.float64) for one in (gate_up, down)]
    exact = torch.zeros_like(x, dtype=torch.float64)
    for token in range(tokens):
        for factor, expert in zip(factors[token], chosen[token].tolist(), strict=True):
            hidden = silu_and_mul((wide[0][expert] @ x[token].double())[None])[0]
            exact[token] += factor.double() * (wide[1][expert] @ hidden)
    backend = TritonMoe(torch.device(DEVICE))
    with poisoned():
        first = backend.forward(x, router, weights)
    assert error(first, exact) < LIMIT
    assert torch.equal(first, backend.forward(x, router, weights))


@pytest.mark.parametrize("tokens", [1, 8])
def test_experts_with_an_activation_that_the_kernels_lack_are_a_bug(tokens: int) -> None:
    """The kernels of int4 compute SiLU alone, also for the few tokens of a decode step."""
    ordered = [in_order(matrices(4, *shape, 32)) for shape in ((128, 128), (128, 64))]
    weights = ExpertWeights(*(ExpertMatrix(one.codes, one) for one in ordered), Activation.GELU)
    x, router = normal(tokens, 128, dtype=DTYPE), router_of(4, 128)._replace(bias=None)
    with pytest.raises(AssertionError, match="SiLU"):
        TritonMoe(torch.device(DEVICE)).forward(x, router, weights)


@pytest.mark.parametrize("group", [32, 64, 128, 160])
def test_ordered_weights_are_dequantised_as_stored_ones(group: int) -> None:
    width = 320 if group == 160 else 2 * group + 64 * (group == 32)
    weights = matrices(2, 24, width, group)
    found = dequantise_ordered(in_order(weights), torch.float32)
    assert torch.equal(found, dequantise(weights, torch.float32))
