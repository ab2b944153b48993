"""Routing and experts, compared with their definition token by token."""

import pytest
import torch
from torch.nn import functional
from torch.nn.functional import silu

from minisgl.core import ConfigError
from minisgl.distributed.comm import TPInfo
from minisgl.kernel.activation import Activation
from minisgl.kernel.fp8_weights import FP8, Scales, dequantise
from minisgl.layers.linear import LinearBuild, UnquantizedLinear
from minisgl.moe.base import ExpertFormat, ExpertMatrix, ExpertWeights, Router, route
from minisgl.moe.block import MoeBlock
from minisgl.moe.experts import UnquantizedExperts
from minisgl.moe.registry import resolve_moe_backend
from minisgl.moe.spec import ExpertsSpec
from minisgl.moe.torch_backend import TorchMoe
from minisgl.moe.triton_backend import TritonMoe, with_kernels

CPU = torch.device("cpu")


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("shared", [0, 2])
def test_experts_equal_their_definition(shared: int, renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 8, generator=generator)
    router = torch.randn(5, 8, generator=generator)
    router[4] = 0.0
    x[:, 0] = 1.0
    router[4, 0] = -99.0  # an expert that no token chooses
    further = torch.randn(8 if shared else 0, 8, generator=generator)
    gate_up = torch.randn(5 + shared, 12, 8, generator=generator)
    down = torch.randn(5 + shared, 8, 6, generator=generator)
    weights = ExpertWeights(ExpertMatrix(gate_up), ExpertMatrix(down))
    backend = resolve_moe_backend("auto", CPU)(CPU)
    rows = torch.cat((router, further))
    out = backend.forward(x, Router(rows, None, 2, renormalise, shared), weights)
    for token in range(9):
        probs = (router @ x[token]).softmax(0)
        chosen = probs.argsort(descending=True)[:2]
        scale = probs[chosen].sum() if renormalise else 1.0
        factors = {int(expert): probs[expert] / scale for expert in chosen}
        factors |= {5 + i: (further[0] @ x[token]).sigmoid() for i in range(shared)}
        expected = torch.zeros(8)
        for expert, factor in factors.items():
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += factor * (down[expert] @ (silu(gate) * up))
        torch.testing.assert_close(out[token], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.RELU2])
def test_experts_have_another_activation_than_silu(activation: Activation) -> None:
    generator = torch.Generator().manual_seed(0)
    x, router = (torch.randn(n, 8, generator=generator) for n in (9, 1))
    gate_up = torch.randn(1, 6 * activation.products, 8, generator=generator)
    down = torch.randn(1, 8, 6, generator=generator)
    weights = ExpertWeights(ExpertMatrix(gate_up), ExpertMatrix(down), activation)
    out = TorchMoe(CPU).forward(x, Router(router, None, 1, True), weights)
    first, up = (x @ gate_up[0].T)[:, :6], (x @ gate_up[0].T)[:, -6:]
    hidden = up.clamp(min=0) ** 2
    if activation is Activation.GELU:
        hidden = functional.gelu(first, approximate="tanh") * up
    torch.testing.assert_close(out, hidden @ down[0].T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("renormalise", [True, False])
def test_a_correction_changes_the_choice_and_not_the_routing_weights(renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, correction = (torch.randn(size, generator=generator) for size in ((9, 6), (6,)))
    router = Router(logits, None, 2, renormalise, 2, False, correction, 2.5)
    weights, experts = route(logits, router)
    for token in range(9):
        scores = logits[token].sigmoid()
        chosen = (scores + correction).argsort(descending=True)[:2]
        total = scores[chosen].sum() if renormalise else 1.0
        assert experts[token].tolist() == [*chosen.tolist(), 6, 7]
        wanted = torch.cat((2.5 * scores[chosen] / total, torch.ones(2)))
        torch.testing.assert_close(weights[token], wanted)


@pytest.mark.parametrize(
    ("name", "says"),
    [("fast", "'fast' is not known"), ("triton", "'triton' cannot be used: it needs a GPU")],
)
def test_backends_that_cannot_be_used_are_refused(name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve_moe_backend(name, CPU)


class PlainMoe(TorchMoe):
    """A backend of another package, which computes no shared experts."""

    name = "plain"

    @classmethod
    def refusal(cls, spec: ExpertsSpec, form: ExpertFormat) -> str | None:
        return f"{form} shared experts" if spec.shared else None


def test_experts_that_a_backend_refuses_are_an_error_of_the_configuration() -> None:
    build = LinearBuild(TPInfo(0, 1), torch.float32, UnquantizedLinear)
    spec = ExpertsSpec(4, 2, 6, True)
    MoeBlock(8, spec, build, UnquantizedExperts, PlainMoe(CPU))
    shared = spec._replace(shared=1)
    MoeBlock(8, shared, build, UnquantizedExperts, TorchMoe(CPU))
    with pytest.raises(ConfigError, match="'plain' does not support unquantised shared experts"):
        MoeBlock(8, shared, build, UnquantizedExperts, PlainMoe(CPU))


@pytest.mark.parametrize("form", ExpertFormat)
@pytest.mark.parametrize("activation", Activation)
def test_kernels_of_packed_experts_compute_the_gate_of_silu_alone(
    form: ExpertFormat, activation: Activation
) -> None:
    spec = ExpertsSpec(4, 2, 6, True, activation=activation)
    refused = form in ("MXFP4", "int4") and activation is not Activation.SILU
    assert (TritonMoe.refusal(spec, form) is not None) == refused
    assert TorchMoe.refusal(spec, form) is None


@pytest.mark.parametrize(("columns", "on_gpu"), [(16, True), (32, False)])
def test_fp8_experts_without_a_kernel_are_dequantised(columns: int, on_gpu: bool) -> None:
    """The blocks are too small, or the GPU does not convert FP8 (before Ada)."""
    gate_up, down = torch.randn(3, 64, 64).to(FP8), torch.randn(3, 64, 32).to(FP8)
    scales = (
        Scales(torch.rand(3, 2, 64 // columns), 32, columns),
        Scales(torch.rand(3, 2, 32 // columns), 32, columns),
    )
    weights = ExpertWeights(ExpertMatrix(gate_up, scales[0]), ExpertMatrix(down, scales[1]))
    found = with_kernels(weights, torch.float32, on_gpu)
    assert found.gate_up.format is found.down.format is ExpertFormat.UNQUANTISED
    torch.testing.assert_close(found.gate_up.values, dequantise(gate_up, scales[0], torch.float32))
    torch.testing.assert_close(found.down.values, dequantise(down, scales[1], torch.float32))
    assert (with_kernels(weights, torch.float32, True) is weights) == (columns == 32)
