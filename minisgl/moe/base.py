"""Routing, and the seam between a model and how the chosen experts are computed."""

from typing import NamedTuple, Protocol

from torch import Tensor


class ExpertWeights(NamedTuple):
    """One layer's. router: [E, H]; gate_up: [E, 2I, H], gate rows first; down: [E, H, I]."""

    router: Tensor
    gate_up: Tensor
    down: Tensor


def route(router_logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Softmax over all experts in float32, keep the top_k; then, if asked, weights sum to 1.

    router_logits: [T, E]. Returns weights, float32 [T, top_k], and experts, int64 [T, top_k],
    distinct in a row.
    """
    weights, experts = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


class MoeBackend(Protocol):
    """One way to route tokens and to compute the chosen experts' gated MLPs."""

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        """sum over a token's top_k experts of routing weight * down(silu(gate) * up).

        x: [T, H] of the weights' dtype. Returns a new [T, H], this rank's part of the sum when I
        is cut between ranks.
        """
