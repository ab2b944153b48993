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
        gate_up_biases, down_biases = weights.biases or (None, None)
        activate = weights.swiglu or silu_and_mul
        out = torch.zeros_like(x)
        end = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            begin, end = end, end + count
            mine = tokens[begin:end]
            gate_up_bias = None if gate_up_biases is None else gate_up_biases[expert]
            down_bias = None if down_biases is None else down_biases[expert]
            gate_up = _matrix(weights, 0, expert, x.shape[1], x.dtype)
            hidden = activate(linear(x[mine], gate_up, gate_up_bias))
            down = _matrix(weights, 1, expert, hidden.shape[1], x.dtype)
            out.index_add_(0, mine, linear(hidden, down, down_bias) * scales[begin:end])
        return out


def _matrix(
    weights: ExpertWeights, part: int, expert: int, columns: int, dtype: torch.dtype
) -> Tensor:
    """One expert's gate_up (part 0) or down (part 1), [rows, columns] in `dtype`."""
    matrix = (weights.gate_up, weights.down)[part][expert]
    if weights.mxfp4_scales is not None:
        scales_of_part = weights.mxfp4_scales[part][expert]
        return mxfp4_weights.dequantise(matrix, scales_of_part, columns, dtype)
    if weights.scales is not None:
        scales = weights.scales[part]
        scales = scales._replace(values=scales.values[expert])
        return fp8_weights.dequantise(matrix, scales, dtype)
    return matrix
