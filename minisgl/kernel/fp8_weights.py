"""Matrices of FP8 weights (e4m3) with float32 scales: storage, and the torch reference.

A weight is its stored number times the scale of its block. A block has `rows` rows and `columns`
columns. One scale for each row is a block of 1 row and all columns.
"""

from typing import Final, NamedTuple

import torch
from torch import Tensor

FP8: Final = torch.float8_e4m3fn
LARGEST: Final = 448.0  # the largest number of e4m3


class Scales(NamedTuple):
    """The scales of FP8 matrices [..., N, K].

    values: float32 [..., ceil(N / rows), ceil(K / columns)].
    """

    values: Tensor
    rows: int
    columns: int


def dequantise(weight: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Return the weights as a new [..., N, K] of `dtype`. The product is rounded once.

    weight: FP8 [..., N, K].
    """
    height, width = weight.shape[-2:]
    values = scales.values
    if scales.rows > 1:
        values = values.repeat_interleave(scales.rows, -2)[..., :height, :]
    if values.shape[-1] > 1:
        values = values.repeat_interleave(scales.columns, -1)[..., :width]
    return (weight.float() * values).to(dtype)


def row_scales(x: Tensor) -> Tensor:
    """Return the scale of each row with which its largest number is LARGEST. float32 [..., 1].

    x: [..., K] of any float dtype. A row of zeros has a tiny scale.
    """
    return (x.float().abs().amax(-1, keepdim=True) / LARGEST).clamp_min(1e-12)


def quantise(x: Tensor, scales: Tensor) -> Tensor:
    """Return x / scales, rounded to FP8. scales: float32, broadcast to x."""
    return (x.float() / scales).clamp(-LARGEST, LARGEST).to(FP8)
