"""The mixture-of-experts block, which replaces the MLP of sparse layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from minisgl.core import ConfigError
from minisgl.layers.linear import LinearBuild
from minisgl.layers.mlp import DenseSpec, GatedMlp
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import Placement, split_evenly
from minisgl.moe.base import MoeBackend, Router
from minisgl.moe.experts import ExpertsFactory, ExpertShards
from minisgl.moe.spec import ExpertsSpec


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
        spec: ExpertsSpec,
        build: LinearBuild,
        experts: ExpertsFactory,
        backend: MoeBackend,
    ) -> None:
        super().__init__()
        ranks = build.tp.rank, build.tp.size
        self.spec = spec
        self.backend = backend
        inner = split_evenly("", spec.inner, *ranks)
        self.router = nn.Parameter(torch.empty(spec.num_experts, hidden_size))
        self.router_bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.stacked else None
        shards = ExpertShards(build.parent, spec.num_experts, hidden_size, inner, *ranks)
        self.experts = experts(shards, build.dtype)
        form, bias = self.experts.weights().gate_up.format, " with biases" * spec.stacked
        if form not in backend.formats or (spec.stacked and not backend.takes_biases):
            raise ConfigError(
                f"MoE backend {backend.name!r} does not support {form} experts{bias}; "
                "use another --moe-backend"
            )
        self.shared_expert: GatedMlp | None = None
        if spec.shared:
            linear = build._replace(parent=f"{build.parent}.shared_expert")
            self.shared_expert = GatedMlp(hidden_size, DenseSpec(spec.shared), linear)
            self.shared_gate = nn.Parameter(torch.empty(1, hidden_size))

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        """Return the stream; the next norm adds the output to `residual` [T, H].

        block_input: already normalised, because no method folds the norm of a sparse layer.
        """
        x, spec = block_input.x, self.spec
        router = Router(self.router, self.router_bias, spec.top_k, spec.renormalise)
        weights = self.experts.weights()._replace(swiglu=spec.swiglu)
        out = self.backend.forward(x, router, weights)
        if self.shared_expert is not None:
            gate = torch.sigmoid(functional.linear(x, self.shared_gate))
            out = out + gate * self.shared_expert.product(block_input)
        return ResidualStream(out, residual)

    def placements(self, name: str) -> Iterator[Placement]:
        module = "router" if self.spec.stacked else "gate"
        sources = {"router": f"{module}.weight", "router_bias": f"{module}.bias"}
        sources["shared_gate"] = "shared_expert_gate.weight"
        for target, parameter in self.named_parameters(recurse=False):
            yield Placement(f"{name}.{sources[target]}", tuple(parameter.shape), f"{name}.{target}")
