"""The interface between a model and the computation of its experts."""

from abc import ABC, abstractmethod
from enum import StrEnum
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from minisgl.kernel import fp8_weights, mxfp4_weights, packed_order, packed_weights
from minisgl.kernel.activation import Activation, ClampedSwiglu
from minisgl.kernel.dispatch import apply_norm, linear
from minisgl.kernel.elementwise import PendingNorm
from minisgl.layers.norm import ResidualStream
from minisgl.moe.spec import ExpertsSpec


class ExpertFormat(StrEnum):
    """How the matrices of the experts are stored."""

    UNQUANTISED = "unquantised"
    FP8 = "FP8"
    MXFP4 = "MXFP4"
    INT4 = "int4"


class Router(NamedTuple):
    """Chooses top_k of E experts for each token. weight: [R, H]; bias: [R] or None.

    shared: the number of further experts, which follow the E others and compute every token. With
    shared_gate, row E of `weight` is their gate: their routing weight is sigmoid(gate). Later rows
    are padding. Without it, their routing weight is 1.
    renormalise: whether the routing weights of a token's top_k experts sum to 1, before `scale`.
    correction: float32 [E], as ExpertsSpec.sigmoid describes it. None: the scores are a softmax.
    scale: the factor on the routing weights of the top_k experts.
    input: [T, H], the input of the router; None: that of the experts.
    """

    weight: Tensor
    bias: Tensor | None
    top_k: int
    renormalise: bool
    shared: int = 0
    shared_gate: bool = True
    correction: Tensor | None = None
    scale: float = 1.0
    input: Tensor | None = None

    @property
    def gates(self) -> int:
        """The rows of the gate of the shared experts: 0 or 1."""
        return int(self.shared > 0 and self.shared_gate)

    def logits(self, x: Tensor, num_experts: int) -> Tensor:
        """Return the logits of the E experts and, with shared experts, of their gate. x: [T, H].

        num_experts: all of the layer, with the shared ones. Returns [T, E] or [T, E + 1], float32
        with a correction: the sigmoids of different experts are often equal after rounding to 16
        bits, and the authors' code rounds neither.
        """
        rows = num_experts - self.shared + self.gates
        x = x if self.input is None else self.input
        if self.correction is None:
            return linear(x, self.weight, self.bias)[:, :rows]
        if x.is_cuda and x.dtype.itemsize == 2:
            return torch.mm(x, self.weight.t(), out_dtype=torch.float32)[:, :rows]
        return linear(x.float(), self.weight.float())[:, :rows]


class ExpertMatrix(NamedTuple):
    """One matrix [rows, columns] of each of E experts.

    values  [E, rows, columns] of the router's dtype, or of FP8. In MXFP4: codes, uint8 [E, chunks
            of columns, rows, 64] (kernel.mxfp4_weights). In int4: the codes of `scales`.
    scales  those of FP8 weights; those of MXFP4 weights, uint8 [E, chunks of columns, rows, 4];
            int4 weights, whole, also in the order of the kernels; None: they are unquantised.
    bias    [E, rows] of the router's dtype, or None.
    """

    values: Tensor
    scales: (
        fp8_weights.Scales
        | packed_weights.PackedWeights
        | packed_order.OrderedWeights
        | Tensor
        | None
    ) = None
    bias: Tensor | None = None

    @property
    def format(self) -> ExpertFormat:
        match self.scales:
            case None:
                return ExpertFormat.UNQUANTISED
            case fp8_weights.Scales():
                return ExpertFormat.FP8
            case packed_weights.PackedWeights() | packed_order.OrderedWeights():
                return ExpertFormat.INT4
        return ExpertFormat.MXFP4

    def dequantised(
        self, columns: int, dtype: torch.dtype, experts: int | slice = slice(None)
    ) -> "ExpertMatrix":
        """Return the unquantised matrix of one expert, or of a range of them.

        Quantised weights become a new tensor of `dtype`.
        """
        values, scales = self.values[experts], self.scales
        bias = None if self.bias is None else self.bias[experts]
        if isinstance(scales, fp8_weights.Scales):
            part = scales._replace(values=scales.values[experts])
            values = fp8_weights.dequantise(values, part, dtype)
        elif isinstance(scales, packed_weights.PackedWeights):
            values = packed_weights.dequantise(scales[experts], dtype)
        elif isinstance(scales, packed_order.OrderedWeights):
            values = packed_order.dequantise(scales[experts], dtype)
        elif scales is not None:
            values = mxfp4_weights.dequantise(values, scales[experts], columns, dtype)
        return ExpertMatrix(values, bias=bias)


class ExpertWeights(NamedTuple):
    """The weights of one layer's experts, both matrices in one format.

    gate_up: [2I, H] for each expert, the rows of the gate first, or [I, H] without a gate; down:
    [H, I]. I: the inner size of an expert. Experts with biases have a ClampedSwiglu.
    """

    gate_up: ExpertMatrix
    down: ExpertMatrix
    activation: Activation | ClampedSwiglu = Activation.SILU


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """Return the routing weights and the indices of each token's experts, as Router describes them.

    Scores are computed in float32. The shared experts follow the top_k chosen ones.
    logits: as Router.logits returns them. Returns weights, float32 [T, top_k + shared], and
    experts, int64 [T, top_k + shared], distinct in each row.
    """
    logits, num_experts, shared = logits.float(), logits.shape[1] - router.gates, router.shared
    if router.correction is None:
        weights, experts = logits[:, :num_experts].softmax(dim=-1).topk(router.top_k, dim=-1)
    else:
        scores = logits[:, :num_experts].sigmoid()
        experts = (scores + router.correction).topk(router.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
    if router.renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    weights = weights * router.scale
    if shared:
        others = torch.arange(num_experts, num_experts + shared, device=logits.device)
        gate = logits[:, num_experts:].sigmoid() if router.gates else weights.new_ones(1, 1)
        weights = torch.cat((weights, gate.expand(len(logits), shared)), dim=1)
        experts = torch.cat((experts, others.expand(len(logits), -1)), dim=1)
    return weights, experts


class MoeBackend(ABC):
    """One way to route tokens and to compute the gated MLPs of their experts.

    A subclass sets `name`, the name that users give to --moe-backend, and implements `refusal` and
    `forward`. The tuple registry.MOE_BACKENDS lists the backends of minisgl. An entry point passes
    the backends of other packages in engine.Extensions.

    device: the device of the weights and the inputs.
    """

    name: ClassVar[str]

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def obstacle(cls, device: torch.device) -> str | None:
        """The reason why the backend cannot run on `device`; None if it can."""
        return None

    @classmethod
    @abstractmethod
    def refusal(cls, spec: ExpertsSpec, form: ExpertFormat) -> str | None:
        """Name the property of these experts that the backend does not compute; None: none.

        spec: of the experts that the backend would compute. Its `shared` leaves out a shared expert
        that is an MLP of its own. form: how their matrices are stored.
        """

    @abstractmethod
    def forward(self, x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
        """Return, for each token, the sum of weight * down(silu(gate) * up) over its experts.

        ExpertWeights.activation may be another one than silu(gate) * up.

        x: [T, H] of the router's dtype. Returns a new [T, H]. If I is divided over ranks, the
        result is this rank's part of the sum.
        """

    def add(
        self,
        x: Tensor,
        norm: PendingNorm,
        norm_weight: Tensor,
        router: Router,
        weights: ExpertWeights,
    ) -> ResidualStream:
        """Return the residual stream x with the experts' output for the normalised x added.

        For one rank only. A backend whose kernels apply the norm and add returns the sum. This
        default normalises x, runs `forward` and leaves the addition to the next norm.

        x: contiguous [T, H], overwritten. norm: the norm before the experts, with the addition
        before it; norm_weight: [H]. The router has no input of its own.
        """
        normed = apply_norm(x, norm, norm_weight)
        return ResidualStream(self.forward(normed, router, weights), x)
