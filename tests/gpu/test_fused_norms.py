"""Norms inside of the kernels that read the norm's output, on fresh random input.

With TRITON_INTERPRET=1 the kernels run on CPU in float32, in Triton's interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from minisgl.kernel.dispatch import add_linear, linear, normed_linear, silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.packed_order import in_order
from minisgl.kernel.packed_products import packed_add_linear, packed_linear
from minisgl.kernel.packed_weights import PackedKind, dequantise
from minisgl.moe.base import ExpertMatrix, ExpertWeights, Router
from minisgl.moe.triton_backend import TritonMoe
from tests.gpu import test_fp8_experts, test_moe, test_mxfp4_moe
from tests.gpu.graphs import equal_in_a_graph
from tests.gpu.test_fp8_experts import few_programs as few_programs
from tests.gpu.test_kernels import DEVICE, INTERPRETED, error, normal
from tests.gpu.test_kernels import pytestmark as pytestmark
from tests.gpu.test_moe import poisoned
from tests.gpu.test_packed_experts import matrices
from tests.gpu.test_packed_weights import random_weights

# In matrix products, the interpreter takes the bits of bfloat16 for integers.
DTYPE = torch.float32 if INTERPRETED else torch.bfloat16
LIMIT = 1e-5 if INTERPRETED else 6e-3
EPS = 1e-5
EXPERTS, INNER, TOP_K = 5, 64, 2
WIDTHS = [96] if INTERPRETED else [192, 2112]
PRODUCTS = [(6, 160)] if INTERPRETED else [(64, 2048), (6, 320), (96, 5120)]


def plain(width: int) -> ExpertWeights:
    return test_moe.layer(EXPERTS, width, INNER, DTYPE)


def fp8(width: int) -> ExpertWeights:
    return test_fp8_experts.random_experts(EXPERTS, width, INNER, (64, 64))


def mxfp4(width: int) -> ExpertWeights:
    return test_mxfp4_moe.layer(EXPERTS, width, INNER)


def int4(width: int) -> ExpertWeights:
    gate_up, down = (
        in_order(matrices(EXPERTS, *shape, 32)) for shape in ((2 * INNER, width), (width, INNER))
    )
    return ExpertWeights(ExpertMatrix(gate_up.codes, gate_up), ExpertMatrix(down.codes, down))


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    """The norm in float64, rounded to x's dtype."""
    wide = x.double()
    wide = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt()
    return (wide * weight.double()).to(x.dtype)


@pytest.mark.parametrize("layer", [plain, fp8, mxfp4, int4])
@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("added", [False, True])
def test_experts_with_their_norm(
    layer: Callable[[int], ExpertWeights], tokens: int, width: int, added: bool
) -> None:
    """The stream grows by the output of `forward`. Beyond four tokens the norm has a kernel."""
    weights, norm_weight = layer(width), 0.5 + torch.rand(width, device=DEVICE).to(DTYPE)
    router = Router(normal(EXPERTS, width, dtype=DTYPE) * width**-0.5, None, TOP_K, True)
    before, addend = normal(tokens, width, dtype=DTYPE), normal(tokens, width, dtype=DTYPE)
    backend = TritonMoe(torch.device(DEVICE))
    backend._reads_fp8 = lambda: True
    total = before + addend if added else before
    output = backend.forward(norm_of(total, norm_weight), router, weights)
    streams = []
    for _ in range(2):
        norm = PendingNorm(EPS, addend=addend.clone() if added else None)
        with poisoned():
            stream = backend.add(before.clone(), norm, norm_weight, router, weights)
        left = stream.residual
        streams.append(stream.x if left is None else stream.x + left)
        assert (left is None) == (tokens <= 4)
    assert error(streams[0].double() - total.double(), output) < 1.5e-2
    assert torch.equal(*streams)
    assert not backend._semaphores.any()


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 17])
@pytest.mark.parametrize(("height", "width"), PRODUCTS)
def test_normed_linear(rows: int, height: int, width: int) -> None:
    """A norm and a product of few columns. Beyond 16 rows the norm has a kernel of its own."""
    from minisgl.kernel.triton import norm as kernels

    x = normal(rows, 2 * width, dtype=DTYPE)[:, width:]
    weight, norm_weight = normal(height, width, dtype=DTYPE) / width**0.5, normal(width).to(DTYPE)
    normed = norm_of(x, norm_weight)
    with poisoned():
        if INTERPRETED:
            found = kernels.normed_linear(x, weight, norm_weight, EPS)
        else:
            found = normed_linear(x, weight, PendingNorm(EPS), norm_weight)
    assert error(found[0], normed) < LIMIT
    assert error(found[1], normed.double() @ weight.double().T) < LIMIT


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 4, 5])
@pytest.mark.parametrize("width", [2048, 2880, 5120])
def test_linear_after_a_norm_without_squares(rows: int, width: int) -> None:
    """The kernel sums the squares of up to four rows of up to 4,096 columns."""
    x, weight = normal(rows, width, dtype=DTYPE) * 3, normal(4096, width, dtype=DTYPE)
    semaphores = torch.zeros(512, dtype=torch.int32, device=DEVICE)
    wide = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    with poisoned():
        found = linear(x, weight, None, semaphores, PendingNorm(EPS))
    assert error(found, wide @ weight.double().T) < LIMIT
    assert not semaphores.any()


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter does not run Gluon")
@pytest.mark.parametrize("rows", [1, 5, 8, 11, 16, 17])
@pytest.mark.parametrize(("height", "width"), [(1024, 640), (2608, 1280)])
@pytest.mark.parametrize("biased", [False, True])
def test_int4_products_around_a_norm(rows: int, height: int, width: int, biased: bool) -> None:
    """One product adds to the stream, and two read its norm. More than 16 rows are not fused."""
    x, before = normal(rows, width, dtype=DTYPE), normal(rows, height, dtype=DTYPE)
    down = random_weights(PackedKind.INT4, height, width, 128)
    bias = normal(height, dtype=DTYPE) if biased else None
    norm_weight = 0.5 + torch.rand(height, device=DEVICE).to(DTYPE)
    semaphores = torch.zeros(1024, dtype=torch.int32, device=DEVICE)
    exact = before.double() + x.double() @ dequantise(down, torch.float64).T
    exact = exact if bias is None else exact + bias.double()

    def add() -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        with poisoned():
            return packed_add_linear(
                before.clone(), x, in_order(down), bias, semaphores, norm_weight
            )

    total, residual, squares, scaled = add()
    if rows > 16:
        assert squares is scaled is None
        assert residual is not None
        assert error(total.double() + residual.double(), exact) < 1e-2
        return
    assert residual is None
    assert squares is not None
    assert scaled is not None
    assert error(total, exact) < 1e-2
    assert error(squares.sum(0), total.double().square().sum(-1)) < 1e-5
    assert torch.equal(scaled, (total.float() * norm_weight.float()).to(DTYPE))
    again = add()
    assert torch.equal(again[0], total)
    assert torch.equal(again[2], squares)
    if height % 128:
        return  # the width of the products below has whole groups
    normed = norm_of(total, norm_weight).double()
    norm = PendingNorm(EPS, squares, scaled=scaled)
    for gated in (False, True):
        weights = random_weights(PackedKind.INT4, 656, height, 128)
        given = total, in_order(weights), None, semaphores, norm, norm_weight, gated
        with poisoned():
            found = packed_linear(*given)
        expected = normed @ dequantise(weights, torch.float64).T
        expected = silu_and_mul(expected) if gated else expected
        assert error(found, expected) < 1e-2
        assert torch.equal(found, packed_linear(*given))
    assert not semaphores.any()


@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize("layer", [plain, fp8, mxfp4, int4])
@pytest.mark.parametrize("tokens", [1, 4])
def test_sparse_layers_in_a_graph_equal_single_layers(
    layer: Callable[[int], ExpertWeights], tokens: int
) -> None:
    """Experts add to the stream, a product normalises it, and another one adds to it."""
    width = 2048
    router = Router(normal(EXPERTS, width, dtype=DTYPE) * width**-0.5, None, TOP_K, True)
    layers = [
        (layer(width), *(normal(width, width, dtype=DTYPE) / width**0.5 for _ in range(2)))
        for _ in range(6)
    ]
    start, norm_weight = normal(tokens, width, dtype=DTYPE), normal(width, dtype=DTYPE)
    backend = TritonMoe(torch.device(DEVICE))
    semaphores = torch.zeros(256, dtype=torch.int32, device=DEVICE)

    def chain(pause: Callable[[], object]) -> Tensor:
        stream, squares = start.clone(), None
        for weights, first, second in layers:
            norm = PendingNorm(EPS, squares)
            stream = backend.add(stream, norm, norm_weight, router, weights).x
            pause()
            hidden = linear(stream, first, None, semaphores, PendingNorm(EPS))
            pause()
            stream, squares = add_linear(stream, hidden, second, None, semaphores)
            pause()
        return stream

    equal_in_a_graph(chain)


@pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter does not run Gluon")
@pytest.mark.parametrize("rows", [1, 16])
def test_int4_layers_in_a_graph_equal_single_layers(rows: int) -> None:
    layers = [
        [
            in_order(random_weights(PackedKind.INT4, *shape, 128))
            for shape in ((1024, 3072), (6144, 1024))
        ]
        for _ in range(8)
    ]
    start, hidden = normal(rows, 1024, dtype=DTYPE), normal(rows, 3072, dtype=DTYPE)
    norm_weight = 0.5 + torch.rand(1024, device=DEVICE).to(DTYPE)
    semaphores = torch.zeros(1024, dtype=torch.int32, device=DEVICE)

    def chain(pause: Callable[[], object]) -> Tensor:
        stream, inner = start.clone(), hidden
        for down, gate_up in layers:
            given = down, None, semaphores, norm_weight
            stream, _, squares, scaled = packed_add_linear(stream, inner, *given)
            pause()
            norm = PendingNorm(EPS, squares, scaled=scaled)
            operands = gate_up, None, semaphores, norm, norm_weight
            inner = packed_linear(stream, *operands, gated=True)
            pause()
        return torch.cat((stream, inner), dim=1)

    equal_in_a_graph(chain)
