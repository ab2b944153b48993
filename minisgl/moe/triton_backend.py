"""Experts by our Triton kernels: no host sync, graph-capturable, the same result in every run."""

from torch import Tensor

from minisgl.kernel import linear
from minisgl.kernel.triton.moe_few import experts_of_few
from minisgl.kernel.triton.moe_grouped import experts_of_many
from minisgl.kernel.triton.moe_routing import route
from minisgl.moe.base import ExpertWeights

_FEW_TOKENS = 4  # whose experts hardly overlap, so that nothing is won by sorting


class TritonMoe:
    """Implements MoeBackend; the weights are contiguous tensors on a GPU."""

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        scales, experts = route(linear(x, weights.router), top_k, renormalise)
        run = experts_of_few if len(x) <= _FEW_TOKENS else experts_of_many
        return run(x, weights.gate_up, weights.down, scales, experts)
