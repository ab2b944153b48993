"""The activations of MLPs."""

from enum import StrEnum

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel.dispatch import silu_and_mul


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
        gate, up = product.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up
