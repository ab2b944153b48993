"""The weights of a mixture of experts, and the methods that store them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.layers.shards import FusedExperts, LinearShards, Placement, Shard, split_evenly
from minisgl.moe.base import ExpertMatrix, ExpertWeights
from minisgl.moe.spec import ExpertNames


class ExpertShards(NamedTuple):
    """The part of one layer's experts that this rank holds.

    parent       the full name of the MoE block in the checkpoint: model.layers.0.mlp.
    num_experts  experts of the layer. Each rank holds a part of every expert.
    hidden_size  the input and output size of an expert.
    inner        this rank's share of an expert's inner dimension.
    rank, ranks  this tensor-parallel rank, and the number of ranks.
    shared       the last experts, which are parts of the checkpoint's shared expert.
    spelling     the names of the experts' modules in the checkpoint.
    products     as Activation.products.
    """

    parent: str
    num_experts: int
    hidden_size: int
    inner: Shard
    rank: int = 0
    ranks: int = 1
    shared: int = 0
    spelling: ExpertNames = ExpertNames()
    products: int = 2

    @property
    def routed(self) -> int:
        """The number of experts that the router chooses from."""
        return self.num_experts - self.shared

    def without_shared(self) -> "ExpertShards":
        """Return the routed experts alone."""
        return self._replace(num_experts=self.routed, shared=0)

    @property
    def sizes(self) -> tuple[int, int, Shard]:
        """num_experts, hidden_size and inner."""
        return self.num_experts, self.hidden_size, self.inner

    def in_units(self, unit: int) -> "ExpertShards":
        """Return the part for a format that cannot divide `unit` neighbouring inner rows."""
        inner = split_evenly("", self.inner.full, self.rank, self.ranks, unit)
        return self._replace(inner=inner)

    @property
    def names(self) -> list[str]:
        """The full names of the experts' linears in the checkpoint."""
        experts = range(self.num_experts)
        matrices = [matrix for expert in experts for matrix in self.matrices(expert).values()]
        return [name for matrix in matrices for name in matrix.names]

    def matrices(self, expert: int) -> dict[str, LinearShards]:
        """The two matrices of an expert, by the parameter that has this matrix of all experts."""
        parent, inner, names = f"{self.parent}.experts.{expert}", self.inner, self.spelling
        if expert >= self.routed:
            parent = f"{self.parent}.{names.shared}"
            shift, rows = (expert - self.routed) * inner.full, self.shared * inner.full
            inner = inner._replace(shift=shift, rows=rows)
        gate, up = inner._replace(name=names.gate), inner._replace(name=names.up)
        if expert >= self.routed and names.shared_gate_up:
            gate = inner._replace(name=names.shared_gate_up, rows=2 * rows)
            up = gate._replace(shift=shift + rows)
        outputs = (gate, up)[-self.products :]
        hidden = Shard("", self.hidden_size, 0, self.hidden_size)
        down = hidden._replace(name=names.down)
        return {
            "gate_up": LinearShards(outputs, hidden, bias=False, parent=parent),
            "down": LinearShards((down,), inner, bias=False, parent=parent),
        }

    def fused(self, expert: int, parameter: str) -> tuple[FusedExperts | None, ...]:
        """Where each linear of a matrix stands in a checkpoint that fuses the experts.

        None: the linear is part of the shared expert, which no checkpoint fuses with the others.
        """
        experts, hidden, inner = self.routed, self.hidden_size, self.inner.full
        if expert >= experts:
            return (None,) * (1 if parameter == "down" else self.products)
        gate_up, down = (f"{self.parent}.{name}" for name in self.spelling.fused)
        if parameter == "down":
            return (FusedExperts(down, (experts, hidden, inner)),)
        first = FusedExperts(gate_up, (experts, self.products * inner, hidden))
        return tuple(first._replace(first=i * inner) for i in range(self.products))


class ExpertsMethod(nn.Module, ABC):
    """Stores the stacked weights of one layer's experts. The counterpart of LinearMethod.

    A subclass creates its parameters and chooses their dtypes. Padding stays zero.
    shards: of the experts that the method stores. A factory may leave out the shared experts.
    dtype: that of the activations.
    """

    chooses_dtypes: ClassVar[bool] = True

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        super().__init__()
        self.shards = shards

    @abstractmethod
    def placements(self, name: str) -> Iterator[Placement]:
        """Yield the placements of each parameter. name: the full name of the method."""

    def finish(self) -> None:
        """Arrange the parameters once all are loaded."""
        return

    @abstractmethod
    def weights(self) -> ExpertWeights:
        """Return the matrices for a MoE backend, without the gate of the model."""

    def scale_outputs(self, factor: float | Tensor) -> None:
        """Multiply the outputs of all experts by `factor`, in the loaded parameters.

        factor: a tensor [E] has a factor for each expert. Raises ConfigError if the method cannot
        do so.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot multiply the weights of experts, which the model needs: "
            "use a checkpoint with unquantised experts"
        )


def over_experts(factor: float | Tensor, weights: Tensor) -> float | Tensor:
    """Return a factor of ExpertsMethod.scale_outputs in the shape of the weights [E, ...]."""
    return factor.view(-1, *[1] * (weights.dim() - 1)) if isinstance(factor, Tensor) else factor


# Creates the method of one layer's experts for activations of the given dtype.
ExpertsFactory = Callable[[ExpertShards, torch.dtype], ExpertsMethod]


class UnquantizedExperts(ExpertsMethod):
    """Weights of the activations' dtype. gate_up: [E, 2I or I, H]; down: [E, H, I]."""

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        super().__init__(shards, dtype)
        experts, hidden, inner = shards.num_experts, shards.hidden_size, shards.inner.local
        rows = shards.products * inner
        self.gate_up = nn.Parameter(torch.empty(experts, rows, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype))

    def placements(self, name: str) -> Iterator[Placement]:
        for expert in range(self.shards.num_experts):
            for parameter, matrix in self.shards.matrices(expert).items():
                fused = self.shards.fused(expert, parameter)
                placed = matrix.placements(name, parameter, source="weight")
                for placement, tensor in zip(placed, fused, strict=True):
                    yield placement._replace(expert=expert, fused=tensor)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(ExpertMatrix(self.gate_up), ExpertMatrix(self.down))

    def scale_outputs(self, factor: float | Tensor) -> None:
        self.down.mul_(over_experts(factor, self.down))
