"""Experts in plain torch, one after the other. Tests of the fused kernels compare with it."""

import torch
from torch import Tensor
from torch.nn.functional import linear

from minisgl.kernel import fp8_weights, mxfp4_weights, silu_and_mul
from minisgl.moe.base import ExpertWeights, MoeBackend, route


class TorchMoe(MoeBackend):
    """Loops over the experts that have tokens.

    The host reads the number of tokens of each expert, so each call waits for the device.
    """

    name = "torch"
    takes_scales = takes_mxfp4 = takes_biases = True

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        scales, experts = route(linear(x, weights.router, weights.router_bias), top_k, renormalise)
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=len(weights.router)).tolist()
        tokens = order // top_k
        scales = scales.to(x.dtype).flatten()[order].unsqueeze(-1)
        activate = weights.swiglu or silu_and_mul
        out = torch.zeros_like(x)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            begin, end = end, end + count
            mine = tokens[begin:end]
            hidden = activate(_product(x[mine], weights, 0, expert))
            out.index_add_(0, mine, _product(hidden, weights, 1, expert) * scales[begin:end])
        return out


def _product(x: Tensor, weights: ExpertWeights, part: int, expert: int) -> Tensor:
    """Return x times one expert's gate_up (part 0) or down (part 1), plus its bias. x: [N, K]."""
    matrix = (weights.gate_up, weights.down)[part][expert]
    if weights.mxfp4_scales is not None:
        mxfp4_scales = weights.mxfp4_scales[part][expert]
        matrix = mxfp4_weights.dequantise(matrix, mxfp4_scales, x.shape[1], x.dtype)
    if weights.scales is not None:
        scales = weights.scales[part]
        scales = scales._replace(values=scales.values[expert])
        matrix = fp8_weights.dequantise(matrix, scales, x.dtype)
    bias = None if weights.biases is None else weights.biases[part][expert]
    return linear(x, matrix, bias)
