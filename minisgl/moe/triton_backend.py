"""Experts by minisgl's Triton kernels.

The kernels run without host synchronisation, inside CUDA graphs, and give the same result in every
run.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from minisgl.kernel.activation import Activation
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_weights import Scales
from minisgl.kernel.packed_weights import PackedWeights
from minisgl.kernel.slow import log_slow
from minisgl.layers.norm import ResidualStream
from minisgl.moe.base import ExpertFormat, ExpertWeights, MoeBackend, Router
from minisgl.moe.spec import ExpertsSpec

# The matrix unit multiplies this many columns of FP8 weights at once. The columns of a block must
# be a multiple of it.
_LEAST_COLUMNS = 32
# Up to this many tokens rarely share an expert, so sorting them by expert would gain nothing.
_FEW_TOKENS = 4


# As MoeBackend.forward; with a norm and its weight [H], as MoeBackend.add. The fourth argument has
# semaphores, int32 [_FEW_TOKENS], which are zeros before and after a call.
_ExpertsOfFew: TypeAlias = Callable[
    [Tensor, Router, ExpertWeights, Tensor, PendingNorm | None, Tensor | None], Tensor
]


class _Kernels(NamedTuple):
    """The kernels of one format for many tokens and for few.

    takes_few: whether the kernels for few tokens support the experts.
    """

    many: Callable[[Tensor, ExpertWeights, Tensor, Tensor, int], Tensor]
    takes_few: Callable[[Tensor, ExpertWeights], bool]
    few: _ExpertsOfFew


class TritonMoe(MoeBackend):
    """Routes tokens and computes their experts with Triton kernels, on a GPU.

    The weights must be contiguous. All layers share semaphores, so they must run on one stream.
    """

    name = "triton"

    def __init__(self, device: torch.device) -> None:
        # Triton is imported here, because machines without a GPU may not have it.
        from minisgl.kernel.triton import (
            fp8_few,
            int4_few,
            moe_choice,
            moe_few,
            moe_grouped,
            mxfp4_few,
            overlap,
            packed_blocks,
        )

        super().__init__(device)
        grouped, blocks = moe_grouped.experts_of_many, packed_blocks.experts_of_many
        self._kernels = {
            ExpertFormat.UNQUANTISED: _Kernels(grouped, moe_few.takes, moe_few.experts_of_few),
            ExpertFormat.FP8: _Kernels(grouped, fp8_few.takes, fp8_few.experts_of_few),
            ExpertFormat.MXFP4: _Kernels(blocks, mxfp4_few.takes, mxfp4_few.experts_of_few),
            ExpertFormat.INT4: _Kernels(blocks, int4_few.takes, int4_few.experts_of_few),
        }
        self._reads_fp8 = overlap.converts_fp8
        self._route = moe_choice.route
        self._semaphores = torch.zeros(_FEW_TOKENS, dtype=torch.int32, device=device)

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        return "it needs a GPU" if device.type == "cpu" else None

    @classmethod
    def refusal(cls, spec: ExpertsSpec, form: ExpertFormat) -> str | None:
        is_packed = form in (ExpertFormat.MXFP4, ExpertFormat.INT4)
        if is_packed and spec.activation in (Activation.GELU, Activation.RELU2):
            return f"{form} experts with {spec.activation}"
        return None

    def forward(self, x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
        weights = with_kernels(weights, x.dtype, self._reads_fp8())
        kernels = self._kernels[weights.gate_up.format]
        if _are_few(x, weights, kernels):
            return kernels.few(x, router, weights, self._semaphores, None, None)
        logits = router.logits(x, len(weights.down.values))
        routing = self._route(logits, router)
        return kernels.many(x, weights, *routing, router.shared)

    def add(
        self,
        x: Tensor,
        norm: PendingNorm,
        norm_weight: Tensor,
        router: Router,
        weights: ExpertWeights,
    ) -> ResidualStream:
        weights = with_kernels(weights, x.dtype, self._reads_fp8())
        kernels = self._kernels[weights.gate_up.format]
        if not _are_few(x, weights, kernels):
            return super().add(x, norm, norm_weight, router, weights)
        given = x, router, weights, self._semaphores, norm, norm_weight
        return ResidualStream(kernels.few(*given))


def _are_few(x: Tensor, weights: ExpertWeights, kernels: _Kernels) -> bool:
    """Whether the kernels for few tokens compute this step."""
    return len(x) <= _FEW_TOKENS and kernels.takes_few(x, weights)


def with_kernels(weights: ExpertWeights, dtype: torch.dtype, has_kernels: bool) -> ExpertWeights:
    """Return the weights, or dequantised copies if the kernels do not support their blocks.

    has_kernels: whether the GPU has the kernels of FP8 experts.
    """
    gate_up, down, _ = weights
    if isinstance(gate_up.scales, Scales) and isinstance(down.scales, Scales):
        columns = min(gate_up.scales.columns, down.scales.columns)
        if columns % _LEAST_COLUMNS == 0 and has_kernels:
            return weights
        log_slow("experts in FP8 with scales for %d columns on this GPU", columns)
    elif isinstance(gate_up.scales, PackedWeights):
        log_slow("experts in int4 on this GPU")
    else:
        return weights
    # The columns matter for MXFP4 only, whose experts have kernels on every GPU.
    hidden, inner = gate_up.values.shape[2], down.values.shape[2]
    gate_up, down = gate_up.dequantised(hidden, dtype), down.dequantised(inner, dtype)
    return weights._replace(gate_up=gate_up, down=down)
