"""Linear layers cut over the tensor-parallel ranks: by output (column) or by input (row)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from minisgl.distributed import TPInfo
from minisgl.kernel import add_linear, gated_linear, linear
from minisgl.layers.norm import Normed, Stream
from minisgl.layers.shards import Placement, Shard


def _sibling(name: str, part: str) -> str:
    """layers.0.self_attn.qkv_proj, q_proj -> layers.0.self_attn.q_proj"""
    return f"{name.rpartition('.')[0]}.{part}"


_ROWS_PER_COUNTER = 8


def share_counters(model: nn.Module, device: torch.device) -> None:
    """Give all linears of a model one set of counters for split products.

    Their kernels must then follow one another: all forwards of the model run on one stream.
    """
    linears = [module for module in model.modules() if isinstance(module, _Linear)]
    most = max((module.weight.shape[0] for module in linears), default=0)
    counters = torch.zeros(-(-most // _ROWS_PER_COUNTER), dtype=torch.int32, device=device)
    for module in linears:
        module.counters = counters


class _Linear(nn.Module):
    """weight: [rows, columns]; bias: [rows] or None; counters: from share_counters."""

    def __init__(self, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, columns))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.counters: Tensor | None = None


class ColumnParallelLinear(_Linear):
    """Several linears of one input merged into one matrix, each cut by output rows.

    weight: [sum of local rows, in_features]. No communication.
    """

    def __init__(self, in_features: int, parts: Sequence[Shard], bias: bool) -> None:
        super().__init__(sum(part.local for part in parts), in_features, bias)
        self.parts = tuple(parts)

    def forward(self, normed: Normed) -> Tensor:
        return linear(normed.x, self.weight, self.bias, self.counters, normed.norm)

    def placements(self, name: str) -> Iterator[Placement]:
        offset = 0
        for part in self.parts:
            source = _sibling(name, part.name)
            cut = (0, part.begin, part.end, offset)
            shape = (part.full, self.weight.shape[1])
            yield Placement(f"{source}.weight", shape, f"{name}.weight", *cut)
            if self.bias is not None:
                yield Placement(f"{source}.bias", (part.full,), f"{name}.bias", *cut)
            offset += part.local


class MergedGateUpLinear(ColumnParallelLinear):
    """silu(gate) * up of two merged linears, in that order."""

    def forward(self, normed: Normed) -> Tensor:
        return gated_linear(normed.x, self.weight, self.bias, self.counters, normed.norm)


class RowParallelLinear(_Linear):
    """A linear cut by input columns that ends a block: its output goes to the residual stream.

    weight: [out_features, part.local]. A bias is loaded by rank 0 alone (zero elsewhere), so that
    the sum over ranks holds it once.
    """

    def __init__(self, part: Shard, out_features: int, bias: bool, tp: TPInfo) -> None:
        super().__init__(out_features, part.local, bias)
        self.part = part
        self.tp = tp

    def forward(self, x: Tensor, residual: Tensor) -> Stream:
        """residual: [T, out_features], given up."""
        if self.tp.size == 1:
            total, squares = add_linear(residual, x, self.weight, self.bias, self.counters)
            return Stream(total, squares=squares)
        return Stream(linear(x, self.weight, self.bias, self.counters), residual)

    def placements(self, name: str) -> Iterator[Placement]:
        part, out_features = self.part, self.weight.shape[0]
        shape = (out_features, part.full)
        yield Placement(f"{name}.weight", shape, f"{name}.weight", 1, part.begin, part.end)
        if self.bias is not None:
            end = out_features if self.tp.rank == 0 else 0
            yield Placement(f"{name}.bias", (out_features,), f"{name}.bias", 0, 0, end)
