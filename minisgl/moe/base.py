"""Routing, and the seam between a model and how the chosen experts are computed."""

from typing import NamedTuple, Protocol

from torch import Tensor


class Routing(NamedTuple):
    """weights: [T, K] in the activations' dtype; experts: int64 [T, K], distinct in a row."""

    weights: Tensor
    experts: Tensor


def route(router_logits: Tensor, top_k: int, renormalise: bool) -> Routing:
    """Softmax over all experts in float32, keep the top_k; then, if asked, weights sum to 1.

    router_logits: [T, E].
    """
    weights, experts = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(weights.to(router_logits.dtype), experts)


class MoeBackend(Protocol):
    """One way to compute the chosen experts' gated MLPs."""

    def forward(self, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing) -> Tensor:
        """sum over a token's experts of weight * down(silu(gate) * up).

        x: [T, H]; gate_up: [E, 2I, H], gate rows first; down: [E, H, I]. Returns [T, H], this
        rank's part of the sum when I is cut between ranks.
        """
        ...
