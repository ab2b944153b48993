"""Experts in plain torch, one after the other. Tests of the fused kernels compare with it."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from minisgl.moe.base import ExpertFormat, ExpertMatrix, ExpertWeights, MoeBackend, Router, route
from minisgl.moe.spec import ExpertsSpec


class TorchMoe(MoeBackend):
    """Loops over the experts that have tokens.

    The host reads the number of tokens of each expert, so each call waits for the device.
    """

    name = "torch"

    @classmethod
    def refusal(cls, spec: ExpertsSpec, form: ExpertFormat) -> None:
        """It computes all experts."""

    def forward(self, x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
        logits = router.logits(x, len(weights.down.values))
        scales, experts = route(logits, router)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat).tolist()
        tokens = order // experts.shape[1]
        scales = scales.to(x.dtype).flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(x)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            begin, end = end, end + count
            mine = tokens[begin:end]
            hidden = weights.activation(_product(x[mine], weights.gate_up, expert))
            out.index_add_(0, mine, _product(hidden, weights.down, expert) * scales[begin:end])
        return out


def _product(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
    """Return x times the matrix of one expert, plus its bias. x: [N, K]."""
    own = matrix.dequantised(x.shape[1], x.dtype, expert)
    return linear(x, own.values, own.bias)
