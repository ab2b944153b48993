"""Experts with FP8 weights, against float64 on the dequantised weights. See test_fp8_weights.py."""

import pytest
import torch
from torch import Tensor

from minisgl.kernel.dispatch import silu_and_mul
from minisgl.kernel.fp8_weights import FP8, Scales
from minisgl.moe.base import ExpertMatrix, ExpertWeights, Router, route
from minisgl.moe.torch_backend import TorchMoe
from tests.gpu.test_fp8_weights import DTYPE, QUANTISED_LIMIT, random_weights
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.gpu.test_moe import poisoned

LIMIT = 1e-5 if INTERPRETED else 1.5e-2
SEMAPHORES = torch.empty(0, dtype=torch.int32)  # these kernels use none


BLOCKS = [(1, 1024), (128, 128), (32, 32)]
# Tiles do not divide these sizes. tokens, experts, width, inner
FEW = [(1, 4, 96, 32), (2, 6, 80, 16)]
if not INTERPRETED:
    FEW += [(1, 4, 2304, 544), (4, 8, 160, 64)]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a program more rows in the interpreter, whose time is that of the programs."""
    from minisgl.kernel.triton import fp8_few, int4_few

    if INTERPRETED:
        monkeypatch.setattr(fp8_few, "_ROWS", 8)
        monkeypatch.setattr(fp8_few, "_DOWN_ROWS", 16)
        monkeypatch.setattr(int4_few, "_ROWS", 4)
        monkeypatch.setattr(int4_few, "_DOWN_ROWS", 8)


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(
    ("tokens", "experts", "width", "inner"), [(1, 4, 256, 96), (3, 8, 160, 64)]
)
@pytest.mark.parametrize("shared", [0, 1])
def test_experts_of_many_tokens(
    shared: int, tokens: int, experts: int, width: int, inner: int, blocks: tuple[int, int]
) -> None:
    """Tiles do not divide the sizes."""
    from minisgl.kernel.triton.moe_grouped import experts_of_many

    router = random_router(experts, width, shared)
    weights = random_experts(experts, width, inner, blocks)
    x = normal(tokens, width, dtype=DTYPE)
    routing = routed(x, router, experts)
    found = experts_of_many(x, weights, *routing, shared, quantised=False)
    assert error(found, reference(x, router, weights)) < LIMIT


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("tokens", "experts", "width", "inner"), FEW)
@pytest.mark.parametrize("shared", [0, 1])
@pytest.mark.parametrize("columns", [32] if INTERPRETED else [32, 512])
def test_experts_of_few_tokens(
    columns: int,
    shared: int,
    tokens: int,
    experts: int,
    width: int,
    inner: int,
    blocks: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Matrix-vector products, also with more columns than a program loads at once."""
    from minisgl.kernel.triton import fp8_few

    monkeypatch.setattr(fp8_few, "_COLUMNS", columns)
    router = random_router(experts, width, shared)
    weights = random_experts(experts, width, inner, blocks)
    x = normal(tokens, width, dtype=DTYPE)
    with poisoned():
        found = [fp8_few.experts_of_few(x, router, weights, SEMAPHORES) for _ in range(2)]
    assert error(found[0], reference(x, router, weights)) < LIMIT
    assert torch.equal(*found)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("rule", ["renormalised", "of all", "sigmoids", "equal", "nan"])
def test_the_experts_choose_as_the_routing_does(rule: str, shared: int) -> None:
    """Of equal logits the lower id comes first; an expert whose logit is NaN is not chosen."""
    from minisgl.kernel.triton import fp8_few

    tokens, experts, width, inner = 2, 11, 48, 16
    router = random_router(experts, width, shared)._replace(top_k=3, renormalise=rule != "of all")
    if rule == "sigmoids":
        correction = 8 + normal(experts - shared)
        router = router._replace(shared_gate=False, correction=correction, scale=2.5)
    if rule == "equal":
        router.weight[: experts - shared] = router.weight[0]
    if rule == "nan":
        router.weight[1] = torch.nan
    weights = random_experts(experts, width, inner, (32, 32))
    x = normal(tokens, width, dtype=DTYPE)
    with poisoned():
        found = fp8_few.experts_of_few(x, router, weights, SEMAPHORES)
    assert error(found, reference(x, router, weights)) < LIMIT


def test_experts_convert_all_numbers_exactly() -> None:
    """Token t has up[t] times SiLU(448), which is 448, in its first column."""
    from minisgl.kernel.triton.moe_grouped import experts_of_many

    codes = torch.arange(256, device=DEVICE).to(torch.uint8).view(FP8)
    finite = torch.where(codes.float().isnan(), 0.0, codes.float())
    gate_up, down = (torch.zeros(1, *shape, device=DEVICE) for shape in ((128, 256), (256, 64)))
    gate_up[0, :64], gate_up[0, 64], down[0, 0, 0] = 448, finite, 1
    matrices = [
        ExpertMatrix(
            matrix.to(FP8), Scales(torch.ones(1, rows, 1, device=DEVICE), 1, matrix.shape[2])
        )
        for matrix, rows in ((gate_up, 128), (down, 256))
    ]
    x = torch.eye(256, device=DEVICE, dtype=DTYPE)
    factors = torch.ones(256, 1, device=DEVICE)
    experts = torch.zeros(256, 1, device=DEVICE, dtype=torch.int32)
    weights = ExpertWeights(*matrices)
    found = experts_of_many(x, weights, factors, experts, quantised=False)
    # A GPU replaces a division by a constant by a product with the rounded inverse. The test
    # therefore multiplies.
    assert torch.equal(found[:, 0].float(), finite * 448)


@pytest.mark.parametrize("blocks", [(1, 1024), (128, 128)])
def test_experts_of_many_tokens_with_quantised_activations(blocks: tuple[int, int]) -> None:
    from minisgl.kernel.triton.moe_grouped import experts_of_many

    tokens, experts, width, inner = (5, 4, 256, 128) if INTERPRETED else (2000, 8, 1024, 384)
    router = random_router(experts, width, shared=1)
    weights = random_experts(experts, width, inner, blocks)
    x = normal(tokens, width, dtype=DTYPE)
    found = experts_of_many(x, weights, *routed(x, router, experts), 1, quantised=True)
    assert error(found, reference(x, router, weights)) < 2 * QUANTISED_LIMIT


def random_router(experts: int, width: int, shared: int) -> Router:
    weight = normal(experts + 8, width, dtype=DTYPE) * width**-0.5
    return Router(weight, None, 2, True, shared)


def random_experts(experts: int, width: int, inner: int, blocks: tuple[int, int]) -> ExpertWeights:
    gate_up = random_weights(experts, 2 * inner, width, blocks=blocks)
    down = random_weights(experts, width, inner, blocks=blocks)
    return ExpertWeights(ExpertMatrix(*gate_up), ExpertMatrix(*down))


def routed(x: Tensor, router: Router, num_experts: int) -> tuple[Tensor, Tensor]:
    factors, experts = route(router.logits(x, num_experts), router)
    return factors.contiguous(), experts.int().contiguous()


def reference(x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
    """The experts one after the other in float64, on the CPU; the routing is that of x's dtype."""
    from minisgl.kernel.triton import moe_choice

    logits = router.logits(x, len(weights.down.values))
    factors, experts = (one.cpu() for one in moe_choice.route(logits, router))
    matrices = (weights.gate_up, weights.down)
    gate_up, down = (one.dequantised(0, torch.float64).values.cpu() for one in matrices)
    x = x.cpu().double()
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for factor, expert in zip(factors[token], experts[token], strict=True):
            hidden = silu_and_mul(x[token] @ gate_up[expert].T)
            out[token] += factor.double() * (hidden @ down[expert].T)
    return out.to(DEVICE)


def test_the_reference_of_experts_is_the_torch_backend() -> None:
    weights = random_experts(4, 256, 96, (32, 32))
    x, router = normal(7, 256), Router(normal(4, 256) / 16, None, 2, True)
    own = TorchMoe(torch.device(DEVICE)).forward(x, router, weights)
    assert error(own, reference(x, router, weights)) < 1e-5
