"""The dense MLP of a decoder layer."""

from typing import NamedTuple

from torch import Tensor, nn

from minisgl.kernel.activation import Activation
from minisgl.layers.linear import (
    ColumnParallelLinear,
    LinearBuild,
    LinearMethod,
    RowParallelLinear,
)
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import merge, split_evenly


class DenseNames(NamedTuple):
    """The names of a dense MLP in the checkpoint: the module of the layer, and its linears.

    gate_up: the linear of gate and up, if the checkpoint merges them.
    """

    block: str = "mlp"
    gate_up: str = "gate_up_proj"
    down: str = "down_proj"


class DenseSpec(NamedTuple):
    """The dense MLP of one decoder layer.

    inner       its inner size.
    bias        whether all linears have a bias.
    merged      the checkpoint stores gate and up as one tensor.
    activation  of the gate, or of up if there is no gate.
    names       the names in the checkpoint.
    """

    inner: int
    bias: bool = False
    merged: bool = False
    activation: Activation = Activation.SILU
    names: DenseNames = DenseNames()

    @property
    def features(self) -> int:
        """The inner features whose weights a step of many tokens reads."""
        return self.inner


class DenseMlp(nn.Module):
    """down(silu(gate) * up), or another activation of DenseSpec.

    The inner size is padded to a multiple of the number of ranks.
    """

    def __init__(self, size: int, spec: DenseSpec, build: LinearBuild) -> None:
        super().__init__()
        gate = split_evenly("gate_proj", spec.inner, build.tp.rank, build.tp.size)
        up, down = gate._replace(name="up_proj"), gate._replace(name=spec.names.down)
        outputs = (gate, up)[-spec.activation.products :]
        if spec.merged:
            outputs = merge(spec.names.gate_up, outputs)
        self.gate_up_proj = ColumnParallelLinear(size, outputs, spec.bias, build)
        self.down_proj = RowParallelLinear(down, size, spec.bias, build)
        self.activation = spec.activation
        if spec.activation is Activation.SILU:
            self.gate_up_proj.method.leave_gate_to(self.down_proj.method)

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        return self.down_proj.forward(self._activated(block_input), residual)

    def product(self, block_input: BlockInput) -> Tensor:
        """Return this rank's part of the output [T, H], which is not added to a residual stream."""
        return self.down_proj.method.product(self._activated(block_input))

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        """Take over the weight [H] of the norm before the MLP, as LinearMethod.fold."""
        return self.gate_up_proj.method.fold(norm_weight, before)

    def scale_outputs(self, factor: float) -> None:
        """Multiply the loaded weights of the last product. Raises ConfigError."""
        method = self.down_proj.method
        method.scale_rows(0, method.shards.rows, factor)

    def _activated(self, block_input: BlockInput) -> Tensor:
        """Return the input of the last product, [T, I]."""
        method = self.gate_up_proj.method
        if self.activation is Activation.SILU:
            return method.gated(*block_input)
        return self.activation(method.product(*block_input))
