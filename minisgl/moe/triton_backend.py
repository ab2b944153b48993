"""Experts by minisgl's Triton kernels.

The kernels run without host synchronisation, inside CUDA graphs, and give the same result in every
run.
"""

import logging
from functools import lru_cache

import torch
from torch import Tensor

from minisgl.kernel import linear
from minisgl.kernel.fp8_weights import dequantise
from minisgl.moe.base import Biases, ExpertWeights, MoeBackend

logger = logging.getLogger(__name__)

# The matrix unit multiplies this many columns of FP8 weights at once. The columns of a block must
# be a multiple of it.
_LEAST_COLUMNS = 32
# Up to this many tokens rarely share an expert, so sorting them by expert would gain nothing.
_FEW_TOKENS = 4


class TritonMoe(MoeBackend):
    """Routes tokens and computes their experts with Triton kernels, on a GPU.

    The weights must be contiguous. All layers share semaphores, so they must run on one stream.
    """

    name = "triton"
    takes_scales = takes_mxfp4 = takes_biases = True

    def __init__(self, device: torch.device) -> None:
        # Triton is imported here, because machines without a GPU may not have it.
        from minisgl.kernel.triton import (
            fp8_moe,
            moe_few,
            moe_grouped,
            moe_routing,
            mxfp4,
            mxfp4_blocks,
            mxfp4_few,
            overlap,
            stacked_moe,
        )

        super().__init__(device)
        self._experts_of_few = moe_few.experts_of_few
        self._experts_of_many = moe_grouped.experts_of_many
        self._fp8_experts_of_few = fp8_moe.experts_of_few
        self._fp8_experts_of_many = fp8_moe.experts_of_many
        self._reads_fp8 = overlap.converts_fp8
        self._mxfp4_experts_of_few = mxfp4_few.experts_of_few
        self._takes_few_mxfp4 = mxfp4.takes
        self._mxfp4_experts_of_many = mxfp4_blocks.experts_of_many
        self._stacked_experts_of_many = stacked_moe.experts_of_many
        self._route = moe_routing.route
        self._semaphores = torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        return "it needs a GPU" if device.type == "cpu" else None

    def forward(self, x: Tensor, weights: ExpertWeights, top_k: int, renormalise: bool) -> Tensor:
        if weights.biases is not None:
            return self._stacked(x, weights, weights.biases, top_k, renormalise)
        weights = with_kernels(weights, x.dtype, self._reads_fp8())
        router, gate_up, down, fp8 = weights[:4]
        if len(x) <= _FEW_TOKENS:
            few = (self._semaphores, top_k, renormalise)
            if fp8 is None:
                return self._experts_of_few(x, router, gate_up, down, *few)
            return self._fp8_experts_of_few(x, router, gate_up, down, fp8, *few)
        factors, experts = self._route(linear(x, router), top_k, renormalise)
        if fp8 is None:
            return self._experts_of_many(x, gate_up, down, factors, experts)
        return self._fp8_experts_of_many(x, gate_up, down, fp8, factors, experts)

    def _stacked(
        self, x: Tensor, weights: ExpertWeights, biases: Biases, top_k: int, renormalise: bool
    ) -> Tensor:
        assert weights.swiglu is not None, "biased experts need a clamped SwiGLU; this is a bug"
        matrices, scales = (weights.gate_up, weights.down), weights.mxfp4_scales
        router = (weights.router, weights.router_bias)
        if len(x) <= _FEW_TOKENS and scales is not None and self._takes_few_mxfp4(x):
            few = (self._semaphores, top_k, renormalise)
            return self._mxfp4_experts_of_few(
                x, router, matrices, scales, biases, *few, *weights.swiglu
            )
        routing = self._route(linear(x, *router), top_k, renormalise)
        if scales is None:
            return self._stacked_experts_of_many(x, *matrices, biases, *routing, *weights.swiglu)
        return self._mxfp4_experts_of_many(x, *matrices, scales, biases, *routing, *weights.swiglu)


def with_kernels(weights: ExpertWeights, dtype: torch.dtype, has_kernels: bool) -> ExpertWeights:
    """Return the weights, or dequantised copies if the kernels do not support their blocks.

    has_kernels: whether the GPU has the kernels of FP8 experts.
    """
    if weights.scales is None:
        return weights
    gate_up_scales, down_scales = weights.scales
    columns = min(scales.columns for scales in (gate_up_scales, down_scales))
    if columns % _LEAST_COLUMNS == 0 and has_kernels:
        return weights
    _log_slow(columns)
    gate_up = dequantise(weights.gate_up, gate_up_scales, dtype)
    down = dequantise(weights.down, down_scales, dtype)
    return weights._replace(gate_up=gate_up, down=down, scales=None)


@lru_cache(maxsize=8)
def _log_slow(columns: int) -> None:
    logger.warning(
        "no FP8 kernel on this GPU for experts with scales for %d columns: each call dequantises "
        "the weights",
        columns,
    )
