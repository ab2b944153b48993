"""The interface between a model and the computation of its experts."""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.fp8_weights import Scales


class ClampedSwiglu(NamedTuple):
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), after a clamp to `limit`.

    The clamp bounds the gate from above, and the up projection on both sides.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [..., 2I], the gate first. Returns [..., I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


class Biases(NamedTuple):
    """The biases of one layer's experts. gate_up: [E, 2I]; down: [E, H]."""

    gate_up: Tensor
    down: Tensor


class ExpertWeights(NamedTuple):
    """The weights of one layer's E experts.

    router: [E, H]; gate_up: [E, 2I, H], the rows of the gate first; down: [E, H, I]. I: the inner
    size of an expert. scales: those of gate_up and of down if they are FP8; None: they have the
    router's dtype. biases: those of the experts, or None. router_bias: [E] or None. swiglu: the
    gate of the experts; None: silu(gate) * up. mxfp4_scales: those of gate_up and of down if they
    are MXFP4, uint8 [E, chunks of H, 2I, 4] and [E, chunks of I, H, 4]; the matrices are then
    codes, uint8 [E, chunks of H, 2I, 64] and [E, chunks of I, H, 64] (kernel.mxfp4_weights).
    """

    router: Tensor
    gate_up: Tensor
    down: Tensor
    scales: tuple[Scales, Scales] | None = None
    biases: Biases | None = None
    router_bias: Tensor | None = None
    swiglu: ClampedSwiglu | None = None
    mxfp4_scales: tuple[Tensor, Tensor] | None = None


def route(router_logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return the routing weights and the indices of each token's top_k experts.

    Softmax runs over all experts in float32. With renormalise, a token's weights sum to 1.
    router_logits: [T, E]. Returns weights, float32 [T, top_k], and experts, int64 [T, top_k],
    distinct in each row.
    """
    weights, experts = router_logits.float().softmax(dim=-1).topk(top_k, dim=-1)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


class MoeBackend(ABC):
    """One way to route tokens and to compute the gated MLPs of their experts.

    A subclass sets `name`, the name that users give to --moe-backend, and implements `forward`.
    takes_scales, takes_mxfp4: whether the backend computes experts with FP8 or MXFP4 weights.
    takes_biases: whether it computes biases and the gate of ExpertWeights.swiglu.
    The tuple registry.MOE_BACKENDS lists the backends of minisgl. An entry point passes the
    backends of other packages in engine.Extensions.

    device: the device of the weights and the inputs.
    """

    name: ClassVar[str]
    takes_scales: ClassVar[bool] = False
    takes_mxfp4: ClassVar[bool] = False
    takes_biases: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        """The reason why the backend cannot run on `device`; None if it can."""
        return None

    @abstractmethod
    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        """Return, for each token, the sum of weight * down(silu(gate) * up) over its top_k experts.

        ExpertWeights.swiglu may take the place of silu(gate) * up.

        x: [T, H] of the weights' dtype. Returns a new [T, H]. If I is divided over ranks, the
        result is this rank's part of the sum.
        """
