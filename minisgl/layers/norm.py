"""RMSNorm as a module: on the residual stream, or on each head."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.kernel import add_rms_norm, rms_norm
from minisgl.layers.shards import Placement


class RMSNorm(nn.Module):
    """weight: [size], whole on every rank."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size]."""
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); both inputs are given up."""
        return add_rms_norm(x, residual, self.weight, self.eps)

    def placements(self, name: str) -> Iterator[Placement]:
        yield Placement(f"{name}.weight", tuple(self.weight.shape), f"{name}.weight")
