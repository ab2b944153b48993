"""The mixture-of-experts block, which replaces the MLP of sparse layers."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.kernel.activation import Activation
from minisgl.kernel.dispatch import linear
from minisgl.layers.linear import LinearBuild, LinearMethod
from minisgl.layers.mlp import DenseMlp, DenseSpec
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import Placement, split_evenly
from minisgl.moe.base import ExpertWeights, MoeBackend, Router
from minisgl.moe.experts import ExpertsFactory, ExpertShards
from minisgl.moe.spec import ExpertsSpec

# Rows of the router for the gate of the shared experts. torch's products are slow if their number
# of outputs is not a multiple of 8.
_GATE_ROWS = 8


class MoeBlock(nn.Module):
    """Routes all tokens on every rank. Each rank holds a share of every expert's inner dimension.

    router: [R, H], as in Router. `experts` stores the experts; I is this rank's padded share of the
    inner dimension. A shared expert, whose output a gate may scale, is stored as further experts,
    or as an MLP of its own if the method of the experts leaves it out. The router of gpt-oss has a
    bias, and its experts have the clamped SwiGLU.
    norm_weight: the weight of the norm before the block, once it is folded.
    Raises ConfigError if the backend does not support the experts.
    """

    norm_weight: Tensor | None

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
        self.parent = build.parent
        self.register_buffer("norm_weight", None, persistent=False)
        inner = split_evenly("", spec.inner, *ranks)
        rows = spec.num_experts + (_GATE_ROWS if spec.shared and spec.shared_gate else 0)
        self.router = nn.Parameter(torch.empty(rows, hidden_size))
        self.router_bias = nn.Parameter(torch.empty(spec.num_experts)) if spec.stacked else None
        source = f"{build.parent}.{spec.names.correction}"
        self.correction = _OfExperts(spec.num_experts, source) if spec.sigmoid else None
        source = f"{build.parent}.{spec.names.factors}"
        self.factors = _OfExperts(spec.num_experts, source, 1.0) if spec.factors else None
        num_experts = spec.num_experts + spec.shared
        shards = ExpertShards(build.parent, num_experts, hidden_size, inner, *ranks, spec.shared)
        shards = shards._replace(spelling=spec.names, products=spec.products)
        self.experts = experts(shards, build.dtype)
        self.shared = self.experts.shards.shared
        self.shared_expert = None
        if spec.shared and not self.shared:
            assert isinstance(spec.activation, Activation), "a biased shared expert; this is a bug"
            linears = build._replace(parent=f"{build.parent}.{spec.names.shared}")
            always = DenseSpec(spec.shared * spec.inner, activation=spec.activation)
            self.shared_expert = DenseMlp(hidden_size, always, linears)
        form = self.experts.weights().gate_up.format
        refused = backend.refusal(spec._replace(shared=self.shared), form)
        if refused is not None:
            raise ConfigError(
                f"MoE backend {backend.name!r} does not support {refused}; "
                "use another --moe-backend"
            )

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        """Return the stream with the output added, or left for the next norm to add to `residual`.

        residual: [T, H], overwritten.
        """
        x, norm = block_input
        if norm is None:
            return ResidualStream(self.product(block_input), residual)
        assert self.norm_weight is not None, "a norm that is not folded is pending; this is a bug"
        given = norm, self.norm_weight, self._router(self.router), self._weights()
        return self.backend.add(x, *given)

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        """As LinearMethod.fold: keep a copy, since the router and the experts read the norm.

        A shared expert that is an MLP of its own reads it too, so its block folds nothing.
        """
        if self.shared_expert is not None:
            return False
        self.norm_weight = norm_weight.clone()
        return True

    def product(self, block_input: BlockInput, router_input: Tensor | None = None) -> Tensor:
        """Return this rank's part of the output [T, H]. router_input: as Router.input."""
        x, spec = block_input.x, self.spec
        if self.shared_expert is None:
            return self.backend.forward(x, self._router(self.router, router_input), self._weights())
        router = self._router(self.router[: spec.num_experts], router_input)
        out = self.backend.forward(x, router, self._weights())
        always = self.shared_expert.product(block_input)
        if spec.shared_gate:
            always *= linear(x, self.router[spec.num_experts :])[:, :1].sigmoid()
        return out + always

    def _router(self, weight: Tensor, own_input: Tensor | None = None) -> Router:
        spec = self.spec
        return Router(
            weight,
            self.router_bias,
            spec.top_k,
            spec.renormalise,
            self.shared,
            spec.shared_gate,
            None if self.correction is None else self.correction.values,
            spec.scale,
            own_input,
        )

    def _weights(self) -> ExpertWeights:
        return self.experts.weights()._replace(activation=self.spec.activation)

    def finish(self) -> None:
        """Multiply the loaded weights by the factors of the experts. Raises ConfigError."""
        if self.factors is not None:
            self.experts.scale_outputs(self.factors.values)

    def scale_outputs(self, factor: float) -> None:
        """Multiply the loaded weights of the experts' last product. Raises ConfigError."""
        self.experts.scale_outputs(factor)
        if self.shared_expert is not None:
            self.shared_expert.scale_outputs(factor)

    def placements(self, name: str) -> Iterator[Placement]:
        experts, hidden = self.spec.num_experts, self.router.shape[1]
        source, router = f"{self.parent}.{self.spec.names.router}", f"{name}.router"
        yield Placement(f"{source}.weight", (experts, hidden), router)
        if self.router_bias is not None:
            yield Placement(f"{source}.bias", (experts,), f"{name}.router_bias")
        if self.spec.shared and self.spec.shared_gate:
            gate = f"{self.parent}.shared_expert_gate.weight"
            yield Placement(gate, (1, hidden), router, offset=experts)


class _OfExperts(nn.Module):
    """A number for each expert. values: float32 [E]. constant: as in Placement."""

    chooses_dtypes = True

    def __init__(self, num_experts: int, source: str, constant: float | None = None) -> None:
        super().__init__()
        self.source, self.constant = source, constant
        self.values = nn.Parameter(torch.empty(num_experts, dtype=torch.float32))

    def placements(self, name: str) -> Iterator[Placement]:
        shape = tuple(self.values.shape)
        yield Placement(self.source, shape, f"{name}.values", constant=self.constant)
