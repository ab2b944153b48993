"""MXFP4 matrices: storage, and the torch reference (OCP Microscaling Formats, version 1.0).

A block is 32 neighbouring weights of a row. A weight is an e2m1 code of 4 bits, and a byte holds
two weights, the first one in its low bits. A block has one scale, a power of two as an e8m0 byte.
"""

from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 32
BLOCK_BYTES: Final = BLOCK // 2
_BIAS = 127  # of the exponent of a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; bit 3 is the sign


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights [..., n * 32] in `dtype`.

    codes: uint8 [..., n * 16], two codes in a byte. scales: uint8 [..., n], powers of two.
    """
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    blocks = table[pairs.int()].view(*scales.shape, BLOCK)
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _BIAS)
    return (blocks * powers.unsqueeze(-1)).flatten(-2).to(dtype)
