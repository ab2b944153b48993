"""Products of activations with FP8 weights, as linear layers call them.

CPU tensors, and every product without a kernel of its own, run the reference: the weights are
dequantised for the call, and torch computes the product.
"""

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel.dispatch import rms_norm, silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8 import Scales, dequantise


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
    norm: PendingNorm | None = None,
) -> Tensor:
    """dispatch.linear with the dequantised weight. Returns a new [T, N] of x's dtype.

    x: [T, K]; weight: FP8 [N, K]; bias: [N] of x's dtype. If `norm` is given, x is normalised
    first. semaphores: as in dispatch.linear.
    """
    return functional.linear(_normed(x, norm), dequantise(weight, scales, x.dtype), bias)


def fp8_gated_linear(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
    norm: PendingNorm | None = None,
) -> Tensor:
    """silu_and_mul of `fp8_linear`. weight: FP8 [2I, K], the rows of gate before those of up.

    Returns [T, I].
    """
    return silu_and_mul(fp8_linear(x, weight, scales, bias, semaphores, norm))


def fp8_add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Add `fp8_linear` to residual [T, N], in place. The result is as that of add_linear."""
    return residual.add_(fp8_linear(x, weight, scales, bias, semaphores)), None


def _normed(x: Tensor, norm: PendingNorm | None) -> Tensor:
    return x if norm is None else rms_norm(x, norm.weight, norm.eps)
