"""The mixture-of-experts block, which replaces the MLP of sparse layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.core import ConfigError
from minisgl.layers.linear import LinearBuild
from minisgl.layers.mlp import GatedMlp
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import Placement, split_evenly
from minisgl.models.config import MoeConfig
from minisgl.moe.base import ClampedSwiglu, MoeBackend
from minisgl.moe.experts import ExpertsFactory, ExpertShards


class MoeBlock(nn.Module):
    """Routes all tokens on every rank. Each rank holds a share of every expert's inner dimension.

    router: [E, H]. `experts` stores the experts; I is this rank's padded share of the inner
    dimension. A shared expert computes every token; a gate scales its output (Qwen2-MoE). The
    router of gpt-oss has a bias, [E], and its experts have the clamped SwiGLU.
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
        shared, ranks = moe.shared_expert_intermediate_size, (build.tp.rank, build.tp.size)
        self.moe = moe
        self.backend = backend
        inner = split_evenly("", moe.moe_intermediate_size, *ranks)
        self.router = nn.Parameter(torch.empty(moe.num_experts, hidden_size))
        self.router_bias = nn.Parameter(torch.empty(moe.num_experts)) if moe.stacked else None
        self.swiglu = ClampedSwiglu(moe.swiglu_alpha, moe.swiglu_limit)
        shards = ExpertShards(build.parent, moe.num_experts, hidden_size, inner, *ranks)
        self.experts = experts(shards, build.dtype)
        weights = self.experts.weights(self.router)
        for given, is_supported, kind in (
            (weights.scales, backend.takes_scales, "quantised experts"),
            (weights.mxfp4_scales, backend.takes_mxfp4, "MXFP4 experts"),
            (weights.biases, backend.takes_biases, "experts with biases"),
        ):
            if given is not None and not is_supported:
                raise ConfigError(
                    f"MoE backend {backend.name!r} does not support {kind}; "
                    "use another --moe-backend"
                )
        self.shared_expert: GatedMlp | None = None
        if shared:
            parent = f"{build.parent}.shared_expert"
            self.shared_expert = GatedMlp(hidden_size, shared, build._replace(parent=parent))
            self.shared_gate = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        """Return the stream; the next norm adds the output to `residual` [T, H].

        block_input: already normalised, because no method folds the norm of a sparse layer.
        """
        x, moe, weights = block_input.x, self.moe, self.experts.weights(self.router)
        if self.router_bias is not None:
            weights = weights._replace(router_bias=self.router_bias, swiglu=self.swiglu)
        out = self.backend.forward(x, weights, moe.num_experts_per_tok, moe.norm_topk_prob)
        if self.shared_expert is not None:
            gate = torch.sigmoid(functional.linear(x, self.shared_gate))
            out = out + gate * self.shared_expert.product(block_input)
        return ResidualStream(out, residual)

    def placements(self, name: str) -> Iterator[Placement]:
        module = "router" if self.moe.stacked else "gate"
        sources = {"router": f"{module}.weight", "router_bias": f"{module}.bias"}
        sources["shared_gate"] = "shared_expert_gate.weight"
        for target, parameter in self.named_parameters(recurse=False):
            yield Placement(f"{name}.{sources[target]}", tuple(parameter.shape), f"{name}.{target}")
