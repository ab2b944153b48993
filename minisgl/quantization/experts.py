"""FP8 experts: the stacked e4m3 weights of a mixture of experts."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.layers.experts import ExpertShards, ExpertsMethod
from minisgl.layers.shards import Placement
from minisgl.moe.base import ExpertWeights
from minisgl.quantization.format import Fp8Format, Matrix


class Fp8Experts(ExpertsMethod):
    """gate_up: e4m3 [E, 2I, H]; down: e4m3 [E, H, I]; each with its scales, as in Scales."""

    def __init__(self, shards: ExpertShards, dtype: torch.dtype, form: Fp8Format) -> None:
        super().__init__()
        self.shards = shards
        self.form = form
        self._matrices = {one.name: Matrix(*one[1:]) for one in shards.matrices()}
        gate_up, self._gate_up_blocks = self._matrices["gate_up"].empty(form, shards.num_experts)
        down, self._down_blocks = self._matrices["down"].empty(form, shards.num_experts)
        self.gate_up = nn.Parameter(gate_up, requires_grad=False)
        self.down = nn.Parameter(down, requires_grad=False)
        self.gate_up_scales = nn.Parameter(self._gate_up_blocks.values, requires_grad=False)
        self.down_scales = nn.Parameter(self._down_blocks.values, requires_grad=False)

    def placements(self, name: str) -> Iterator[Placement]:
        blocks = {"gate_up": self._gate_up_blocks, "down": self._down_blocks}
        for matrix, parts in self._matrices.items():
            target, scales = f"{name}.{matrix}", (f"{name}.{matrix}_scales", blocks[matrix])
            for expert in range(self.shards.num_experts):
                parent = f"{self.shards.parent}.experts.{expert}"
                yield from parts.placements(self.form, parent, target, scales, expert)

    def weights(self, router: Tensor) -> ExpertWeights:
        gate_up = self._gate_up_blocks._replace(values=self.gate_up_scales)
        down = self._down_blocks._replace(values=self.down_scales)
        return ExpertWeights(router, self.gate_up, self.down, (gate_up, down))
