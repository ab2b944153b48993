"""Routing and the experts against their definition, token by token."""

import pytest
import torch
from torch.nn.functional import silu

from minisgl.core import ConfigError
from minisgl.moe import create_moe_backend, route


@pytest.mark.parametrize("renormalise", [True, False])
def test_experts_equal_their_definition(renormalise: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(9, 8, generator=generator)
    gate_up = torch.randn(5, 12, 8, generator=generator)
    down = torch.randn(5, 8, 6, generator=generator)
    logits = torch.randn(9, 5, generator=generator)
    logits[:, 4] = -9.0  # an expert that nobody chooses
    routing = route(logits, 2, renormalise)
    out = create_moe_backend("torch").forward(x, gate_up, down, routing)
    for token in range(9):
        probs = logits[token].softmax(0)
        chosen = probs.argsort(descending=True)[:2]
        scale = probs[chosen].sum() if renormalise else 1.0
        expected = torch.zeros(8)
        for expert in chosen:
            gate, up = (gate_up[expert] @ x[token]).chunk(2)
            expected += probs[expert] / scale * (down[expert] @ (silu(gate) * up))
        torch.testing.assert_close(out[token], expected, atol=1e-5, rtol=1e-4)


def test_unknown_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fast' is not known"):
        create_moe_backend("fast")
