"""The experts of gpt-oss: one tensor for each matrix of all experts, with biases.

Gate and up are interleaved: row 2i of gate_up belongs to the gate, row 2i + 1 to up. The model
stores the rows of the gate first.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from minisgl.layers.shards import Placement, Shard
from minisgl.moe.base import ExpertMatrix, ExpertWeights
from minisgl.moe.experts import ExpertShards, ExpertsMethod


class StackedExperts(ExpertsMethod):
    """The biases of the experts. A subclass adds the matrices gate_up and down.

    source: the name of the experts in the checkpoint. gate_up_bias: [E, 2I]; down_bias: [E, H],
    zero except on the first rank, because the outputs of the ranks are added up.
    """

    gate_up: nn.Parameter
    down: nn.Parameter

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        super().__init__(shards, dtype)
        self.source = f"{shards.parent}.experts"
        experts, inner = shards.num_experts, shards.inner.local
        self.gate_up_bias = nn.Parameter(torch.empty(experts, 2 * inner, dtype=dtype))
        self.down_bias = nn.Parameter(torch.empty(experts, shards.hidden_size, dtype=dtype))

    def placements(self, name: str) -> Iterator[Placement]:
        experts, inner = self.shards.num_experts, self.shards.inner
        yield Placement(
            f"{self.source}.gate_up_proj_bias",
            (experts, 2 * inner.full),
            f"{name}.gate_up_bias",
            convert=partial(gate_then_up, inner=inner),
        )
        yield Placement(
            f"{self.source}.down_proj_bias",
            tuple(self.down_bias.shape),
            f"{name}.down_bias",
            dim=0,
            end=experts if inner.begin == 0 else 0,
        )

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            ExpertMatrix(self.gate_up, bias=self.gate_up_bias),
            ExpertMatrix(self.down, bias=self.down_bias),
        )


class UnquantizedStackedExperts(StackedExperts):
    """Matrices of the activations' dtype. The checkpoint stores each matrix transposed."""

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        super().__init__(shards, dtype)
        experts, hidden, inner = shards.num_experts, shards.hidden_size, shards.inner.local
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype))

    def placements(self, name: str) -> Iterator[Placement]:
        experts, hidden, inner = self.shards.sizes
        yield Placement(
            f"{self.source}.gate_up_proj",
            (experts, hidden, 2 * inner.full),
            f"{name}.gate_up",
            convert=partial(_transposed_gate_up, inner=inner),
        )
        yield Placement(
            f"{self.source}.down_proj",
            (experts, inner.full, hidden),
            f"{name}.down",
            dim=1,
            begin=inner.begin,
            end=inner.end,
            convert=partial(torch.transpose, dim0=1, dim1=2),
        )
        yield from super().placements(name)


def gate_then_up(rows: Tensor, inner: Shard) -> Tensor:
    """Return this rank's rows of the gate, then of up, with its padding.

    rows: [E, 2 * inner.full, ...], interleaved. Returns [E, 2 * inner.local, ...].
    """
    result = rows.new_zeros(len(rows), 2, inner.local, *rows.shape[2:])
    for half in range(2):
        part = rows[:, half::2][:, inner.begin : inner.end]
        result[:, half, : part.shape[1]] = part
    return result.flatten(1, 2)


def _transposed_gate_up(matrices: Tensor, inner: Shard) -> Tensor:
    return gate_then_up(matrices.transpose(1, 2), inner)
