"""FP8 experts: the stacked e4m3 weights of a mixture of experts."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.layers.shards import Placement
from minisgl.moe.base import ExpertMatrix, ExpertWeights
from minisgl.moe.experts import ExpertShards, ExpertsMethod, over_experts
from minisgl.quantization.format import BLOCK, Fp8Format, empty_matrix, fp8_placements


class Fp8Experts(ExpertsMethod):
    """gate_up: e4m3 [E, 2I, H]; down: e4m3 [E, H, I]; each with its scales, as in Scales.

    Raises ConfigError if parts of the shared expert would begin within a block of its scales.
    """

    def __init__(self, shards: ExpertShards, dtype: torch.dtype, form: Fp8Format) -> None:
        super().__init__(shards, dtype)
        self.form = form
        if form.strategy == "block" and shards.shared > 1 and shards.inner.full % BLOCK:
            raise ConfigError(
                f"{shards.parent}.{shards.spelling.shared} has FP8 blocks of {BLOCK} weights, and "
                f"minisgl divides it into experts of inner size {shards.inner.full}: "
                f"moe_intermediate_size must be a multiple of {BLOCK}"
            )
        matrices = shards.matrices(0)
        gate_up, self._gate_up_blocks = empty_matrix(matrices["gate_up"], form, shards.num_experts)
        down, self._down_blocks = empty_matrix(matrices["down"], form, shards.num_experts)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.gate_up_scales = nn.Parameter(self._gate_up_blocks.values, requires_grad=False)
        self.down_scales = nn.Parameter(self._down_blocks.values, requires_grad=False)

    def placements(self, name: str) -> Iterator[Placement]:
        blocks = {"gate_up": self._gate_up_blocks, "down": self._down_blocks}
        for expert in range(self.shards.num_experts):
            for parameter, matrix in self.shards.matrices(expert).items():
                targets, scales = (parameter, f"{parameter}_scales"), blocks[parameter]
                for placement in fp8_placements(matrix, self.form, name, targets, scales):
                    yield placement._replace(expert=expert)

    def scale_outputs(self, factor: float | Tensor) -> None:
        self.down_scales.mul_(over_experts(factor, self.down_scales))

    def weights(self) -> ExpertWeights:
        gate_up = self._gate_up_blocks._replace(values=self.gate_up_scales)
        down = self._down_blocks._replace(values=self.down_scales)
        return ExpertWeights(ExpertMatrix(self.gate_up, gate_up), ExpertMatrix(self.down, down))
