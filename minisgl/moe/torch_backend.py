"""Experts in plain torch, one after the other. Tests of the fused kernels compare with it."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from minisgl.kernel import silu_and_mul
from minisgl.kernel.fp8_weights import Scales, dequantise
from minisgl.moe.base import ExpertWeights, MoeBackend, route


class TorchMoe(MoeBackend):
    """Loops over the experts that have tokens.

    The host reads the number of tokens of each expert, so each call waits for the device.
    """

    name = "torch"
    takes_scales = True
    takes_biases = True

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        scales, experts = route(linear(x, weights.router, weights.router_bias), top_k, renormalise)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(weights.router)).tolist()
        tokens = order // top_k
        scales = scales.to(x.dtype).flatten()[order].unsqueeze(-1)
        gate_up_scales, down_scales = weights.scales or (None, None)
        gate_up_biases, down_biases = weights.biases or (None, None)
        activate = weights.swiglu or silu_and_mul
        out = torch.zeros_like(x)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            begin, end = end, end + count
            mine = tokens[begin:end]
            gate_up = _of(expert, weights.gate_up, gate_up_scales, x.dtype)
            down = _of(expert, weights.down, down_scales, x.dtype)
            gate_up_bias = None if gate_up_biases is None else gate_up_biases[expert]
            down_bias = None if down_biases is None else down_biases[expert]
            hidden = activate(linear(x[mine], gate_up, gate_up_bias))
            out.index_add_(0, mine, linear(hidden, down, down_bias) * scales[begin:end])
        return out


def _of(expert: int, matrices: Tensor, scales: Scales | None, dtype: torch.dtype) -> Tensor:
    """The matrix of one expert, in `dtype`."""
    if scales is None:
        return matrices[expert]
    return dequantise(matrices[expert], scales._replace(values=scales.values[expert]), dtype)
