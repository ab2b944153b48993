"""The mixture-of-experts block that takes an MLP's place, with all experts in two tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.distributed import Communicator
from minisgl.layers import Normed, Placement, Stream, split_evenly
from minisgl.models.config import MoeConfig
from minisgl.moe import ExpertWeights, MoeBackend


class MoeBlock(nn.Module):
    """Every rank routes all tokens and holds a slice of each expert's intermediate dimension.

    Parameters as in ExpertWeights; I is this rank's padded share.
    """

    def __init__(
        self, hidden_size: int, moe: MoeConfig, comm: Communicator, backend: MoeBackend
    ) -> None:
        super().__init__()
        self.moe = moe
        self.backend = backend
        self.cut = split_evenly("", moe.intermediate_size, comm.tp.rank, comm.tp.size)
        self.router = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        self.gate_up = nn.Parameter(torch.empty(moe.num_experts, 2 * self.cut.local, hidden_size))
        self.down = nn.Parameter(torch.empty(moe.num_experts, hidden_size, self.cut.local))

    def forward(self, normed: Normed, residual: Tensor) -> Stream:
        weights = ExpertWeights(self.router, self.gate_up, self.down)
        moe = self.moe
        out = self.backend.forward(normed.x, weights, moe.experts_per_token, moe.renormalise)
        return Stream(out, residual)

    def placements(self, name: str) -> Iterator[Placement]:
        cut, hidden_size = self.cut, self.down.shape[1]
        rows, columns = (cut.full, hidden_size), (hidden_size, cut.full)
        yield Placement(f"{name}.gate.weight", tuple(self.router.shape), f"{name}.router")
        for e in range(self.moe.num_experts):
            for source, shape, target, dim, offset in (
                ("gate_proj", rows, "gate_up", 0, 0),
                ("up_proj", rows, "gate_up", 0, cut.local),
                ("down_proj", columns, "down", 1, 0),
            ):
                yield Placement(
                    f"{name}.experts.{e}.{source}.weight",
                    shape,
                    f"{name}.{target}",
                    dim,
                    cut.begin,
                    cut.end,
                    offset,
                    expert=e,
                )
