"""The mixture-of-experts block, which replaces the MLP of sparse layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.distributed.comm import Communicator
from minisgl.layers.linear import LinearBuild
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import Placement, split_evenly
from minisgl.models.config import ModelConfig, MoeConfig
from minisgl.models.mlp import GatedMlp
from minisgl.moe.base import ExpertWeights, MoeBackend


class MoeBlock(nn.Module):
    """Routes all tokens on every rank. Each rank holds a share of every expert's inner dimension.

    All experts of the layer are stacked: the parameters have the shapes of ExpertWeights, where I
    is this rank's padded share of the inner dimension. A shared expert computes every token; a gate
    scales its output (Qwen2-MoE).
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoeConfig,
        comm: Communicator,
        backend: MoeBackend,
        build: LinearBuild,
    ) -> None:
        super().__init__()
        hidden_size, shared = config.hidden_size, moe.shared_expert_intermediate_size
        self.moe = moe
        self.backend = backend
        self.shard = split_evenly("", moe.moe_intermediate_size, comm.tp.rank, comm.tp.size)
        experts, inner = moe.num_experts, self.shard.local
        self.router = nn.Parameter(torch.empty(experts, hidden_size))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden_size))
        self.down = nn.Parameter(torch.empty(experts, hidden_size, inner))
        self.shared_expert = GatedMlp(hidden_size, shared, build) if shared else None
        if shared:
            self.shared_gate = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        """Return the stream; the next norm adds the output to `residual` [T, H].

        block_input: already normalised, because no method folds the norm of a sparse layer.
        """
        weights = ExpertWeights(self.router, self.gate_up, self.down)
        x, moe = block_input.x, self.moe
        out = self.backend.forward(x, weights, moe.num_experts_per_tok, moe.norm_topk_prob)
        if self.shared_expert is not None:
            gate = torch.sigmoid(functional.linear(x, self.shared_gate))
            out = out + gate * self.shared_expert.product(block_input)
        return ResidualStream(out, residual)

    def placements(self, name: str) -> Iterator[Placement]:
        shard, hidden_size = self.shard, self.down.shape[1]
        rows, columns = (shard.full, hidden_size), (hidden_size, shard.full)
        yield Placement(f"{name}.gate.weight", tuple(self.router.shape), f"{name}.router")
        if self.shared_expert is not None:
            source, shape = f"{name}.shared_expert_gate.weight", tuple(self.shared_gate.shape)
            yield Placement(source, shape, f"{name}.shared_gate")
        for expert in range(self.moe.num_experts):
            for module, shape, target, dim, offset in (
                ("gate_proj", rows, "gate_up", 0, 0),
                ("up_proj", rows, "gate_up", 0, shard.local),
                ("down_proj", columns, "down", 1, 0),
            ):
                source = f"{name}.experts.{expert}.{module}.weight"
                cut = (dim, shard.begin, shard.end, offset, expert)
                yield Placement(source, shape, f"{name}.{target}", *cut)
