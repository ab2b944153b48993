"""The mixture-of-experts block, which replaces the MLP of sparse layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.core import ConfigError
from minisgl.layers.experts import ExpertsFactory, ExpertShards
from minisgl.layers.linear import LinearBuild
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import Placement, split_evenly
from minisgl.models.config import MoeConfig
from minisgl.models.mlp import GatedMlp
from minisgl.moe.base import ClampedSwiglu, ExpertWeights, MoeBackend


class MoeBlock(nn.Module):
    """Routes all tokens on every rank. Each rank holds a share of every expert's inner dimension.

    router: [E, H]. `experts` stores the experts; I is this rank's padded share of the inner
    dimension. A shared expert computes every token; a gate scales its output (Qwen2-MoE).
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
        shared = moe.shared_expert_intermediate_size
        self.moe = moe
        self.backend = backend
        inner = split_evenly("", moe.moe_intermediate_size, build.tp.rank, build.tp.size)
        self.router = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        ranks = (build.tp.rank, build.tp.size)
        shards = ExpertShards(build.parent, moe.num_experts, hidden_size, inner, *ranks)
        self.experts = experts(shards, build.dtype)
        weights = self.experts.weights(self.router)
        if weights.scales is not None and not backend.takes_scales:
            raise ConfigError(
                f"MoE backend {backend.name!r} does not support quantised experts; "
                "use another --moe-backend"
            )
        if weights.mxfp4_scales is not None and not backend.takes_mxfp4:
            raise ConfigError(
                f"MoE backend {backend.name!r} does not support MXFP4 experts; "
                "use another --moe-backend"
            )
        if weights.biases is not None and not backend.takes_biases:
            raise ConfigError(
                f"MoE backend {backend.name!r} does not support experts with biases; "
                "use another --moe-backend"
            )
        self.shared_expert: GatedMlp | None = None
        if shared:
            parent = f"{build.parent}.shared_expert"
            self.shared_expert = GatedMlp(hidden_size, shared, build.within(parent))
            self.shared_gate = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        """Return the stream; the next norm adds the output to `residual` [T, H].

        block_input: already normalised, because no method folds the norm of a sparse layer.
        """
        x, moe, weights = block_input.x, self.moe, self.weights()
        out = self.backend.forward(x, weights, moe.num_experts_per_tok, moe.norm_topk_prob)
        if self.shared_expert is not None:
            gate = torch.sigmoid(functional.linear(x, self.shared_gate))
            out = out + gate * self.shared_expert.product(block_input)
        return ResidualStream(out, residual)

    def weights(self) -> ExpertWeights:
        return self.experts.weights(self.router)

    def placements(self, name: str) -> Iterator[Placement]:
        yield Placement(f"{name}.gate.weight", tuple(self.router.shape), f"{name}.router")
        if self.shared_expert is not None:
            source, shape = f"{name}.shared_expert_gate.weight", tuple(self.shared_gate.shape)
            yield Placement(source, shape, f"{name}.shared_gate")


class StackedMoeBlock(MoeBlock):
    """The experts of gpt-oss: a router with a bias, and the clamped SwiGLU."""

    def __init__(
        self,
        hidden_size: int,
        moe: MoeConfig,
        build: LinearBuild,
        experts: ExpertsFactory,
        backend: MoeBackend,
    ) -> None:
        super().__init__(hidden_size, moe, build, experts, backend)
        self.router_bias = nn.Parameter(torch.empty(moe.num_experts))
        self.swiglu = ClampedSwiglu(moe.swiglu_alpha, moe.swiglu_limit)

    def weights(self) -> ExpertWeights:
        weights = super().weights()
        return weights._replace(router_bias=self.router_bias, swiglu=self.swiglu)

    def placements(self, name: str) -> Iterator[Placement]:
        for part, target in (("weight", "router"), ("bias", "router_bias")):
            shape = tuple(getattr(self, target).shape)
            yield Placement(f"{name}.router.{part}", shape, f"{name}.{target}")
