"""The mixture-of-experts block, which replaces the MLP of sparse layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.layers.experts import ExpertsFactory, ExpertShards
from minisgl.layers.linear import LinearBuild
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import Placement, split_evenly
from minisgl.models.config import MoeConfig
from minisgl.moe.base import MoeBackend


class MoeBlock(nn.Module):
    """Routes all tokens on every rank. Each rank holds a share of every expert's inner dimension.

    router: [E, H]. `experts` stores the experts; I is this rank's padded share of the inner
    dimension.
    Raises ConfigError if the backend does not support the format of the experts.
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoeConfig,
        build: LinearBuild,
        experts: ExpertsFactory,
        backend: MoeBackend,
    ) -> None:
        super().__init__()
        self.moe = moe
        self.backend = backend
        inner = split_evenly("", moe.moe_intermediate_size, build.tp.rank, build.tp.size)
        self.router = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        shards = ExpertShards(build.parent, moe.num_experts, hidden_size, inner)
        self.experts = experts(shards, build.dtype)
        if self.experts.weights(self.router).scales is not None and not backend.takes_scales:
            raise ConfigError(
                f"MoE backend {backend.name!r} does not support quantised experts; "
                "use another --moe-backend"
            )

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        """Return the stream; the next norm adds the output to `residual` [T, H].

        block_input: already normalised, because no method folds the norm of a sparse layer.
        """
        x, moe, weights = block_input.x, self.moe, self.experts.weights(self.router)
        out = self.backend.forward(x, weights, moe.num_experts_per_tok, moe.norm_topk_prob)
        return ResidualStream(out, residual)

    def placements(self, name: str) -> Iterator[Placement]:
        yield Placement(f"{name}.gate.weight", tuple(self.router.shape), f"{name}.router")
