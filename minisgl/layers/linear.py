"""Linear layers of tensor-parallel models, and the methods that store and multiply their weights.

A layer defines the part of a matrix that its rank holds (LinearShards), and the use of the
product: the layer returns it, gates it, or adds it to the residual stream. Its LinearMethod
stores that matrix and multiplies with it. A quantised format is therefore one subclass of
LinearMethod, and the layers do not change.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.distributed.comm import TPInfo
from minisgl.kernel.dispatch import add_linear, linear, normed_linear, silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.layers.norm import BlockInput, ResidualStream
from minisgl.layers.shards import LinearShards, Placement, Shard

# A split-K kernel counts the finished splits of each tile. A tile has 8 weight rows or more.
_ROWS_PER_SEMAPHORE = 8


class LinearMethod(nn.Module, ABC):
    """Stores the matrix of one linear layer and multiplies with it.

    A subclass creates its parameters, yields their placements and computes `product`. For example,
    weights stored as int8 with one scale for each output feature:

        class Int8Linear(LinearMethod):
            def __init__(self, shards, dtype):
                super().__init__(shards, dtype)
                weight = torch.empty(shards.rows, shards.inputs.local, dtype=torch.int8)
                self.weight = nn.Parameter(weight, requires_grad=False)
                self.scale = nn.Parameter(torch.empty(shards.rows, dtype=dtype))

            def placements(self, name):
                yield from self.shards.placements(name, "weight", stored=("I8",))
                yield from self.shards.placements(name, "scale", per_row=True)
                yield from super().placements(name)

            def product(self, x, norm=None):
                return functional.linear(x, self.weight * self.scale[:, None], self.bias)

    The model is built on the meta device; the loader then gives each parameter zeroed memory of
    the shape and dtype that the subclass chose. A method with another layout, such as packed
    weights or one scale for a block of weights, yields Placements of its own from self.shards.
    `finish`, `fold`, `gated`, `leave_gate_to` and `add` are optional: their defaults here run the
    plain kernels.

    dtype: the dtype of the model's activations.
    bias: [rows] of that dtype, or None.
    split_k_semaphores: set by share_split_k_semaphores, for kernels that split a product over K.
    """

    chooses_dtypes: ClassVar[bool] = True

    def __init__(self, shards: LinearShards, dtype: torch.dtype) -> None:
        super().__init__()
        self.shards = shards
        self.split_k_semaphores: Tensor | None = None
        bias = torch.empty(shards.rows if shards.bias else 0, dtype=dtype)
        self.bias = nn.Parameter(bias) if shards.bias else None

    @abstractmethod
    def placements(self, name: str) -> Iterator[Placement]:
        """Yield the placements of each parameter. This base method places the bias.

        name: the full name of the method in the model.
        """
        if self.bias is not None:
            for placement in self.shards.placements(name, "bias", per_row=True):
                yield placement if self.shards.owns_bias else placement._replace(end=0)

    @abstractmethod
    def product(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        """Return x @ matrix.T + bias, a new [T, rows] of x's dtype. x: [T, inputs.local].

        norm: an RMSNorm that this method applies to x first, with the addition before it: see
        kernel.apply_norm. The norm has no weight of its own, because `fold` has taken the weight.
        Callers pass a norm only to a method whose `fold` returned True.
        """

    def finish(self) -> None:
        """Arrange the parameters once all are loaded. Raises ConfigError for wrong values."""
        return

    def fold(self, norm_weight: Tensor, before: "LinearMethod | None" = None) -> bool:
        """Take over the multiplication by `norm_weight` [inputs.local], if the method can.

        The method multiplies the columns of the matrix by it, or keeps a copy: the caller
        overwrites `norm_weight` afterwards. Returns True if the method has done so. Each later call
        then has a norm, and its x is neither normalised nor multiplied by `norm_weight`.

        before: the method whose `add` gives x, if there is one. If the kernels of this method read
        PendingNorm.scaled, it calls learn_next_norm of `before` with its copy.
        """
        return False

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        """Multiply the output features begin..end by `factor`, in the loaded parameters.

        Raises ConfigError if the method cannot do so.
        """
        raise ConfigError(
            f"{type(self).__name__} cannot multiply weights by {factor:g}, which the model needs"
        )

    def gated(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        """Return silu(gate) * up of the product, [T, rows / 2]. The gate's rows come first."""
        return silu_and_mul(self.product(x, norm))

    def leave_gate_to(self, following: "LinearMethod") -> None:
        """Learn the method that reads the result of `gated`.

        A method may agree with `following` that `gated` returns the product, [T, rows], and that
        `following` applies SiLU-and-mul. It can do so faster if it quantises its input anyway.
        """

    def learn_next_norm(self, norm_weight: Tensor) -> None:
        """Learn the weight [rows] of the norm that reads the result of `add`.

        `add` may then also store the sum times this weight (ResidualStream.scaled), for a method
        whose kernel cannot multiply by it. The caller does not change `norm_weight` afterwards.
        """

    def add(self, residual: Tensor, x: Tensor) -> ResidualStream:
        """Return the stream of `residual` [T, rows] with the product added. For one rank only.

        A method whose kernel adds in place returns the sum, and the squares of its rows if the
        kernel computed them. This default leaves the addition to the next norm.
        """
        return ResidualStream(self.product(x), residual)


# Creates the method of one linear layer for activations of the given dtype.
LinearMethodFactory = Callable[[LinearShards, torch.dtype], LinearMethod]


class UnquantizedLinear(LinearMethod):
    """A matrix of the activations' dtype. weight: [rows, inputs.local].

    Small bfloat16 steps on Hopper run kernels that fuse the norm, the activation and the sum.
    While split_k_semaphores is None, torch's product runs.
    """

    def __init__(self, shards: LinearShards, dtype: torch.dtype) -> None:
        super().__init__(shards, dtype)
        self.weight = nn.Parameter(torch.empty(shards.rows, shards.inputs.local, dtype=dtype))

    def placements(self, name: str) -> Iterator[Placement]:
        yield from self.shards.placements(name, "weight")
        yield from super().placements(name)

    def product(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, self.split_k_semaphores, norm)

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        self.weight.mul_(norm_weight)
        return True

    def scale_rows(self, begin: int, end: int, factor: float) -> None:
        self.weight[begin:end].mul_(factor)
        if self.bias is not None:
            self.bias[begin:end].mul_(factor)

    def gated(self, x: Tensor, norm: PendingNorm | None = None) -> Tensor:
        return linear(x, self.weight, self.bias, self.split_k_semaphores, norm, gated=True)

    def normed_product(
        self, x: Tensor, norm: PendingNorm, norm_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return x after the norm, and its product, as kernel.normed_linear. There is no bias."""
        return normed_linear(x, self.weight, norm, norm_weight, self.split_k_semaphores)

    def add(self, residual: Tensor, x: Tensor) -> ResidualStream:
        operands = (self.weight, self.bias, self.split_k_semaphores)
        total, squares = add_linear(residual, x, *operands)
        return ResidualStream(total, squares=squares)


class LinearBuild(NamedTuple):
    """The values that all linear layers of a model share.

    dtype: the dtype of the activations.
    parent: as in LinearShards. Each module sets it for its linears.
    """

    tp: TPInfo
    dtype: torch.dtype
    method: LinearMethodFactory
    parent: str = ""


def share_split_k_semaphores(model: nn.Module, device: torch.device) -> None:
    """Give all linears of a model one set of semaphores for products split over K.

    Kernels that share semaphores must not overlap, so all forwards of the model must run on one
    stream.
    """
    methods = [module for module in model.modules() if isinstance(module, LinearMethod)]
    rows = max((method.shards.rows for method in methods), default=0)
    semaphores = torch.zeros(-(-rows // _ROWS_PER_SEMAPHORE), dtype=torch.int32, device=device)
    for method in methods:
        method.split_k_semaphores = semaphores


class ColumnParallelLinear(nn.Module):
    """Linears with the same input, merged into one matrix and divided by output features.

    Each rank holds a share of the rows of every merged linear. No communication.
    """

    def __init__(
        self,
        in_features: int,
        outputs: tuple[Shard, ...],
        bias: bool,
        build: LinearBuild,
    ) -> None:
        super().__init__()
        inputs = Shard("", in_features, 0, in_features)
        shards = LinearShards(outputs, inputs, bias, parent=build.parent)
        self.method = build.method(shards, build.dtype)

    def forward(self, block_input: BlockInput) -> Tensor:
        """Return the outputs of the merged linears side by side, [T, rows]."""
        return self.method.product(*block_input)


class RowParallelLinear(nn.Module):
    """A linear divided by input features. It ends a block: its output joins the residual stream.

    inputs: this rank's share of the input features; `inputs.name` is the name of the linear in the
    checkpoint.
    Rank 0 alone loads a bias, so that the sum over the ranks contains it once.
    """

    def __init__(self, inputs: Shard, out_features: int, bias: bool, build: LinearBuild) -> None:
        super().__init__()
        self.tp = build.tp
        outputs = (Shard(inputs.name, out_features, 0, out_features),)
        shards = LinearShards(outputs, inputs, bias, self.tp.rank == 0, build.parent)
        self.method = build.method(shards, build.dtype)

    def forward(self, x: Tensor, residual: Tensor) -> ResidualStream:
        """Return the stream with the product added. residual: [T, out_features], overwritten.

        With several ranks, or if the method does not add, the next ResidualNorm computes the sum.
        """
        if self.tp.size == 1:
            return self.method.add(residual, x)
        return ResidualStream(self.method.product(x), residual)
