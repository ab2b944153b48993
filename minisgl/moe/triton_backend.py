"""Experts by our Triton kernels: no host sync, graph-capturable, the same result in every run."""

import torch
from torch import Tensor

from minisgl.kernel import linear
from minisgl.kernel.triton.moe_few import experts_of_few
from minisgl.kernel.triton.moe_grouped import experts_of_many
from minisgl.kernel.triton.moe_routing import route
from minisgl.moe.base import ExpertWeights

_FEW_TOKENS = 4  # whose experts hardly overlap, so that nothing is won by sorting


class TritonMoe:
    """Implements MoeBackend; weights are contiguous. For one stream: layers share counters."""

    def __init__(self, device: torch.device) -> None:
        self._arrived = torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        if len(x) <= _FEW_TOKENS:
            return experts_of_few(x, *weights, self._arrived, top_k, renormalise)
        scales, experts = route(linear(x, weights.router), top_k, renormalise)
        return experts_of_many(x, weights.gate_up, weights.down, scales, experts)
