"""The activations of MLPs."""

from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.kernel.dispatch import gelu_and_mul, silu_and_mul


class Activation(StrEnum):
    """The activation of a dense MLP or of an expert, by its name in config.json.

    The input of SiLU and GELU is the gate, which has a product of its own beside up. RELU2 is the
    square of ReLU. It has no gate, and its input is up.
    """

    SILU = "silu"
    GELU = "gelu_pytorch_tanh"
    RELU2 = "relu2"

    @property
    def products(self) -> int:
        """The products of the input of the MLP: gate and up, or up alone."""
        return 1 if self is Activation.RELU2 else 2

    def __call__(self, product: Tensor) -> Tensor:
        """Return the input of the last product, [..., I]. product: [..., products * I]."""
        if self is Activation.SILU:
            return silu_and_mul(product)
        if self is Activation.RELU2:
            return torch.relu(product).square_()
        return gelu_and_mul(product)


class ClampedSwiglu(NamedTuple):
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), after a clamp to `limit`.

    The clamp bounds the gate from above, and the up projection on both sides.
    """

    alpha: float
    limit: float

    @property
    def products(self) -> int:
        """As Activation.products."""
        return 2

    def __call__(self, gate_up: Tensor) -> Tensor:
        """gate_up: [..., 2I], the gate first. Returns [..., I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)
