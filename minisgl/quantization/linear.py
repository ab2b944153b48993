"""FP8 linears: the product of bfloat16 activations with e4m3 weights."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_products import fp8_add_linear, fp8_linear
from minisgl.kernel.fp8_weights import Scales
from minisgl.layers.linear import LinearMethod
from minisgl.layers.norm import ResidualStream
from minisgl.layers.shards import LinearShards, Placement
from minisgl.quantization.format import Fp8Format, empty_matrix, fp8_placements


class Fp8Linear(LinearMethod):
    """A matrix of FP8 weights. weight: e4m3 [rows, columns]; scales: float32, as in Scales.

    norm_weight: the weight of the norm before this linear, or None. It cannot be folded into
    weights that are already rounded, so the kernels multiply the activations by it.
    """

    norm_weight: Tensor | None

    def __init__(self, shards: LinearShards, dtype: torch.dtype, form: Fp8Format) -> None:
        super().__init__(shards, dtype)
        self.form = form
        weight, self._blocks = empty_matrix(shards, form)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scales = nn.Parameter(self._blocks.values, requires_grad=False)
        self.register_buffer("norm_weight", None, persistent=False)
        self.leaves_gate = False

    def placements(self, name: str) -> Iterator[Placement]:
        targets = ("weight", "scales")
        yield from fp8_placements(self.shards, self.form, name, targets, self._blocks)
        yield from super().placements(name)

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        self.norm_weight = norm_weight.clone()
        return True

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        """Multiply the scales. A block of weights must lie within begin..end."""
        rows = self._blocks.rows
        if begin % rows or (end % rows and end != self.shards.rows):
            super().scale_rows(begin, end, factor)
        self.scales[begin // rows : -(-end // rows)].mul_(factor)
        if self.bias is not None:
            self.bias[begin:end].mul_(factor)

    def product(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        return fp8_linear(x, *self._operands(), norm, self.norm_weight)

    def gated(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        given = (norm, self.norm_weight, True, self.leaves_gate)
        return fp8_linear(x, *self._operands(), *given)

    def leave_gate_to(self, following: LinearMethod) -> None:
        """FP8 linears accept gate and up side by side: see fp8_linear."""
        self.leaves_gate = isinstance(following, Fp8Linear)

    def add(self, residual: Tensor, x: Tensor) -> ResidualStream:
        return ResidualStream(*fp8_add_linear(residual, x, *self._operands()))

    def _operands(self) -> tuple[Tensor, Scales, Tensor | None, Tensor | None]:
        scales = self._blocks._replace(values=self.scales)
        return self.weight, scales, self.bias, self.split_k_semaphores
