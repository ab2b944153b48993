"""Experts in plain torch, one after the other: the reference for fused kernels."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from minisgl.kernel import silu_and_mul
from minisgl.moe.base import Routing


class TorchMoe:
    """Loops over the experts that got tokens; learning which ones synchronises with the device."""

    def forward(self, x: Tensor, gate_up: Tensor, down: Tensor, routing: Routing) -> Tensor:
        num_experts = gate_up.shape[0]
        flat = routing.experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=num_experts).tolist()
        tokens = order // routing.experts.shape[1]
        weights = routing.weights.flatten()[order].unsqueeze(-1)
        out = torch.zeros_like(x)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            begin, end = end, end + count
            mine = tokens[begin:end]
            hidden = silu_and_mul(linear(x[mine], gate_up[expert]))
            out.index_add_(0, mine, linear(hidden, down[expert]) * weights[begin:end])
        return out
