"""Linears and experts of 4-bit weights, of all formats that PackedFormat describes."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.packed_order import OrderedWeights
from minisgl.kernel.packed_products import (
    packed_add_linear,
    packed_linear,
    prepare,
)
from minisgl.kernel.packed_weights import PackedKind, PackedWeights, pack, unpack
from minisgl.layers.linear import LinearMethod
from minisgl.layers.norm import ResidualStream
from minisgl.layers.shards import LinearShards, Placement
from minisgl.moe.base import ExpertMatrix, ExpertWeights
from minisgl.moe.experts import ExpertShards, ExpertsMethod, over_experts
from minisgl.quantization.packed import PER_WORD, PackedFormat


class PackedLinear(LinearMethod):
    """A matrix of 4-bit weights. codes, scales, zeros and row_scales: as in PackedWeights.

    `finish` replaces them with codes and headers as in OrderedWeights if the kernels of a GPU
    multiply them.
    g_idx: int32 [merged linears, columns], the group of each column in the checkpoint, or absent.
    columns: int64 [columns], their order in `codes`; None: that of the checkpoint.
    norm_weight: the weight of the norm before this linear, or None. The scales cannot take it,
    because a group of columns has one. next_weight: that of the norm that reads the result of
    `add`, if the linear after this norm reads PendingNorm.scaled; otherwise None.
    """

    scales: nn.Parameter
    codes: nn.Parameter
    row_scales: nn.Parameter
    norm_weight: Tensor | None
    columns: Tensor | None
    next_weight: Tensor | None

    def __init__(self, shards: LinearShards, dtype: torch.dtype, form: PackedFormat) -> None:
        super().__init__(shards, dtype)
        self.form = form
        self.group = form.columns_of(shards)
        for name, parameter in form.parameters(shards, dtype).items():
            self.register_parameter(name, parameter)
        self._dtype = dtype
        self.register_buffer("norm_weight", None, persistent=False)
        self.register_buffer("next_weight", None, persistent=False)
        self.register_buffer("columns", None, persistent=False)
        self._ordered: OrderedWeights | None = None
        if form.column_groups is not None:
            inputs = shards.inputs
            if inputs.local != inputs.stored:
                raise ConfigError(
                    f"{shards.names[0]} has groups whose columns are not neighbours "
                    f"({form.column_groups}), so that ranks cannot share them: use one rank"
                )
            groups = torch.empty((len(shards.outputs), inputs.local), dtype=torch.int32)
            self.g_idx = nn.Parameter(groups, requires_grad=False)

    def placements(self, name: str) -> Iterator[Placement]:
        yield from self.form.placements(self.shards, f"{name}.")
        if (tensor := self.form.column_groups) is not None:
            shape, target = (self.shards.inputs.stored,), f"{name}.g_idx"
            for place, linear in enumerate(self.shards.names):
                source = f"{linear}.{tensor}"
                yield Placement(
                    source, shape, target, offset=place, stored=("I32",), convert=_row, constant=0
                )
        yield from super().placements(name)

    def finish(self) -> None:
        if self.form.column_groups is not None and not self.g_idx.is_meta:
            self._order_columns()
        weights = prepare(_weights(self, self.form, self.group), self._dtype)
        if isinstance(weights, OrderedWeights):
            self._ordered = weights
            _keep(self, weights)

    def _order_columns(self) -> None:
        """Make the columns of each group neighbours. `product` orders its input likewise."""
        first = self.g_idx[0]
        # All zeros means that the columns are in order.
        if not first.any() and not self.g_idx.any():
            return
        counts = torch.bincount(first, minlength=first.numel() // self.group)
        if not torch.equal(self.g_idx, first.expand_as(self.g_idx)) or counts.ne(self.group).any():
            raise ConfigError(
                f"{self.form.column_groups} of {', '.join(self.shards.names)}: the linears must "
                f"have the same groups, each of {self.group} columns"
            )
        columns = first.argsort(stable=True)
        if not torch.equal(columns, torch.arange(len(columns), device=columns.device)):
            self.columns = columns
            self.codes.copy_(pack(unpack(self.codes)[:, columns]))

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        if self.form.row_scales is not None:
            self.row_scales[begin:end].mul_(factor)
        elif self._ordered is not None:
            self._ordered.scales[:, begin:end].mul_(factor)
        else:
            self.scales[begin:end].mul_(factor)
        if self.bias is not None:
            self.bias[begin:end].mul_(factor)

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        if self.columns is not None:
            return False
        self.norm_weight = norm_weight.clone()
        if before is not None:
            before.learn_next_norm(self.norm_weight)
        return True

    def learn_next_norm(self, norm_weight: Tensor) -> None:
        self.next_weight = norm_weight

    def product(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        return packed_linear(*self._operands(x), norm, self.norm_weight)

    def gated(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        return packed_linear(*self._operands(x), norm, self.norm_weight, gated=True)

    def add(self, residual: Tensor, x: Tensor) -> ResidualStream:
        given = *self._operands(x), self.next_weight
        return ResidualStream(*packed_add_linear(residual, *given))

    def _operands(
        self, x: Tensor
    ) -> tuple[Tensor, PackedWeights | OrderedWeights, Tensor | None, Tensor | None]:
        x = x if self.columns is None else x[:, self.columns]
        weights = self._ordered or _weights(self, self.form, self.group)
        return x, weights, self.bias, self.split_k_semaphores


class PackedExperts(ExpertsMethod):
    """Experts of int4 weights. gate_up_codes, down_codes and others: as in PackedWeights.

    `finish` replaces them as in PackedLinear. The ranks share whole groups of the inner dimension.
    Raises ConfigError for other kinds, and if the sizes of the model are not whole groups.
    """

    def __init__(self, shards: ExpertShards, dtype: torch.dtype, form: PackedFormat) -> None:
        unsupported = "column groups" if form.column_groups else form.kind.value
        if form.column_groups is not None or form.kind is not PackedKind.INT4:
            raise ConfigError(
                f"{shards.parent}.experts: experts with {unsupported} weights ({form.name}) are "
                "not supported; supported: int4 weights whose groups are neighbouring columns"
            )
        super().__init__(shards.in_units(form.group or PER_WORD), dtype)
        self.form = form
        self._dtype = dtype
        self._ordered: dict[str, OrderedWeights] = {}
        for matrix, part in self.shards.matrices(0).items():
            for name, parameter in form.parameters(part, dtype, shards.num_experts).items():
                self.register_parameter(f"{matrix}_{name}", parameter)

    def placements(self, name: str) -> Iterator[Placement]:
        for expert in range(self.shards.num_experts):
            for matrix, part in self.shards.matrices(expert).items():
                for placement in self.form.placements(part, f"{name}.{matrix}_"):
                    yield placement._replace(expert=expert)

    def finish(self) -> None:
        for name in ("gate_up", "down"):
            weights = prepare(self._packed(name), self._dtype)
            if isinstance(weights, OrderedWeights):
                self._ordered[name] = weights
                _keep(self, weights, f"{name}_")

    def scale_outputs(self, factor: float | Tensor) -> None:
        ordered = self._ordered.get("down")
        scales = self.get_parameter("down_scales") if ordered is None else ordered.scales
        scales.mul_(over_experts(factor, scales))

    def weights(self) -> ExpertWeights:
        return ExpertWeights(self._matrix("gate_up"), self._matrix("down"))

    def _matrix(self, name: str) -> ExpertMatrix:
        weights = self._ordered.get(name) or self._packed(name)
        return ExpertMatrix(weights.codes, weights)

    def _packed(self, name: str) -> PackedWeights:
        group = self.form.group or self.shards.matrices(0)[name].inputs.local
        return _weights(self, self.form, group, f"{name}_")


def _weights(method: nn.Module, form: PackedFormat, group: int, prefix: str = "") -> PackedWeights:
    codes, scales = (method.get_parameter(prefix + name) for name in ("codes", "scales"))
    zeros, row_scales = (getattr(method, prefix + name, None) for name in ("zeros", "row_scales"))
    return PackedWeights(form.kind, group, codes, scales, zeros, row_scales)


def _keep(method: nn.Module, weights: OrderedWeights, prefix: str = "") -> None:
    """Replace the parameters that were loaded by those in the order of the kernels."""
    for name in ("codes", "scales", "zeros"):
        if hasattr(method, prefix + name):
            delattr(method, prefix + name)
    for name, values in (("codes", weights.codes), ("headers", weights.headers)):
        method.register_parameter(prefix + name, nn.Parameter(values, requires_grad=False))


def _row(groups: Tensor) -> Tensor:
    return groups.view(1, -1)
