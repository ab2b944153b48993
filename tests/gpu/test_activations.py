"""The Triton experts with another activation than SiLU, against float64."""

import pytest
import torch
from torch.nn.functional import gelu, relu

from minisgl.kernel.activation import Activation
from minisgl.moe.base import ExpertMatrix, ExpertWeights
from tests.gpu.test_moe import (
    DEVICE,
    MATRIX_DTYPES,
    TOLERANCE,
    error,
    normal,
    poisoned,
    pytestmark,  # noqa: F401 (marks the tests of this file)
    router_of,
)


@pytest.mark.parametrize("activation", [Activation.GELU, Activation.RELU2])
@pytest.mark.parametrize("dtype", MATRIX_DTYPES, ids=str)
def test_experts_with_another_activation(dtype: torch.dtype, activation: Activation) -> None:
    """Many tokens, and the first 3 of them. RELU2 has rows of up alone."""
    from minisgl.kernel.triton import moe_choice, moe_few, moe_grouped

    gate_up = ExpertMatrix(normal(11, 100 * activation.products, 96, dtype=dtype) * 0.1)
    down = ExpertMatrix(normal(11, 96, 100, dtype=dtype) * 0.1)
    weights, x = ExpertWeights(gate_up, down, activation), normal(40, 96, dtype=dtype)
    router = router_of(11, 96, dtype, 4, shared=2)
    logits = router.logits(x, 11)
    routing = moe_choice.route(logits, router)
    correct = torch.zeros(40, 96, dtype=torch.float64, device=DEVICE)
    for place in range(routing[1].shape[1]):
        chosen = routing[1][:, place].long()
        products = torch.einsum("th,tnh->tn", x.double(), gate_up.values[chosen].double())
        hidden = relu(products) ** 2
        if activation is Activation.GELU:
            hidden = gelu(products[:, :100], approximate="tanh") * products[:, 100:]
        part = torch.einsum("tn,thn->th", hidden, down.values[chosen].double())
        correct += part * routing[0][:, place, None]
    with poisoned():
        out = moe_grouped.experts_of_many(x, weights, *routing, 2)
        semaphores = torch.zeros(3, dtype=torch.int32, device=DEVICE)
        few = moe_few.experts_of_few(x[:3], router, weights, semaphores)
    assert error(out, correct) < TOLERANCE[dtype]
    assert error(few, correct[:3]) < 2 * TOLERANCE[dtype]
