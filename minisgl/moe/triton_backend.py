"""Experts by minisgl's Triton kernels.

The kernels run without host synchronisation, inside CUDA graphs, and give the same result in every
run.
"""

import torch
from torch import Tensor

from minisgl.kernel import linear
from minisgl.moe.base import ExpertWeights, MoeBackend

# Up to this many tokens rarely share an expert, so sorting them by expert would gain nothing.
_FEW_TOKENS = 4


class TritonMoe(MoeBackend):
    """Routes tokens and computes their experts with Triton kernels, on a GPU.

    The weights must be contiguous. All layers share semaphores, so they must run on one stream.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        # Triton is imported here, because machines without a GPU may not have it.
        from minisgl.kernel.triton import moe_few, moe_grouped, moe_routing

        super().__init__(device)
        self._experts_of_few = moe_few.experts_of_few
        self._experts_of_many = moe_grouped.experts_of_many
        self._route = moe_routing.route
        self._semaphores = torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        return "it needs a GPU" if device.type == "cpu" else None

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        if len(x) <= _FEW_TOKENS:
            return self._experts_of_few(x, *weights, self._semaphores, top_k, renormalise)
        scales, experts = self._route(linear(x, weights.router), top_k, renormalise)
        return self._experts_of_many(x, weights.gate_up, weights.down, scales, experts)
