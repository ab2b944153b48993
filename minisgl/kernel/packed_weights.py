"""Matrices of 4-bit weights with a scale for each group of columns: storage, and the reference.

A byte has the codes of two neighbouring columns, that of the even column in the low bits. A group
is `group` neighbouring columns of a row. There are two kinds:

int4   A code is an integer from 0 to 15. A weight is (code - zero) * scale.
nvfp4  A code is an e2m1 number of 4 bits: the sign, two bits of the exponent and one of the
       mantissa. A weight is the number times the scale of its group times the scale of its row.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import torch
from torch import Tensor

# The zero of all groups of an int4 matrix without zeros of its own.
SYMMETRIC_ZERO: Final = 8
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; bit 3 is the sign


class PackedKind(StrEnum):
    """The meaning of a code."""

    INT4 = "int4"
    NVFP4 = "nvfp4"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """A matrix [N, K] of 4-bit weights, or E such matrices, whose tensors then begin with E.

    codes       uint8 [N, K / 2].
    scales      [N, K / group] of the activations' dtype. nvfp4: float8_e4m3fn.
    zeros       int4: [N, K / group] of the scales' dtype, integers from 0 to 15. None: all are
                SYMMETRIC_ZERO.
    row_scales  nvfp4: float32 [N].
    group       columns of a group, a divisor of K. 16 for nvfp4.
    """

    kind: PackedKind
    group: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    row_scales: Tensor | None = None

    def __getitem__(self, experts: int | slice) -> "PackedWeights":
        """Return the matrix of one expert, or those of a range of experts, as views."""
        zeros = None if self.zeros is None else self.zeros[experts]
        rows = None if self.row_scales is None else self.row_scales[experts]
        parts = self.codes[experts], self.scales[experts], zeros, rows
        return PackedWeights(self.kind, self.group, *parts)


def pack(codes: Tensor) -> Tensor:
    """Return two codes in each byte, uint8 [..., K / 2]. codes: uint8 [..., K], 0 to 15."""
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack(codes: Tensor) -> Tensor:
    """Return the codes of `pack`, uint8 [..., K]. codes: uint8 [..., K / 2]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)


def dequantise(weights: PackedWeights, dtype: torch.dtype) -> Tensor:
    """Return the weights as a new [..., N, K] of `dtype`. They are rounded once."""
    codes = unpack(weights.codes).view(*weights.scales.shape, weights.group)
    scales = weights.scales.float()
    if weights.kind is PackedKind.NVFP4:
        assert weights.row_scales is not None, "nvfp4 weights have row scales; this is a bug"
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=codes.device)
        numbers = table[codes.int()]
        scales = scales * weights.row_scales.unsqueeze(-1)
    elif weights.zeros is None:
        numbers = codes.float() - SYMMETRIC_ZERO
    else:
        numbers = codes.float() - weights.zeros.float().unsqueeze(-1)
    return (numbers * scales.unsqueeze(-1)).flatten(-2).to(dtype)
