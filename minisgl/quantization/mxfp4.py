"""MXFP4: experts of gpt-oss with 4 bits for a weight (OCP Microscaling Formats, version 1.0).

A block is 32 neighbouring weights of a row. A weight is an e2m1 code of 4 bits, and a byte holds
two weights, the first one in its low bits. A block has one scale, a power of two as an e8m0 byte.
All other weights of these checkpoints are unquantised.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.layers.experts import ExpertShards
from minisgl.layers.linear import UnquantizedLinear
from minisgl.layers.quantization import Quantization
from minisgl.layers.shards import Placement
from minisgl.layers.stacked_experts import StackedExperts, gate_then_up

BLOCK = 32
_BYTES = BLOCK // 2
_BIAS = 127  # of the exponent of a scale
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the codes 0 to 7; bit 3 is the sign
_STORED = ("U8",)


def mxfp4(settings: Mapping[str, Any]) -> Quantization:
    """The methods of a checkpoint whose quant_method is mxfp4."""
    return Quantization(UnquantizedLinear, stacked_experts=Mxfp4Experts)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weights [..., n * 32] in `dtype`.

    codes: uint8 [..., n * 16], two codes in a byte. scales: uint8 [..., n], powers of two.
    """
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    blocks = table[pairs.int()].view(*scales.shape, BLOCK)
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _BIAS)
    return (blocks * powers.unsqueeze(-1)).flatten(-2).to(dtype)


class Mxfp4Experts(StackedExperts):
    """Matrices in MXFP4, which each call of `matrices` dequantises.

    gate_up: uint8 [E, 2I, H / 2]; down: uint8 [E, H, n * 16] with the n blocks that hold this
    rank's columns; each with its scales, uint8, one for each block.
    Raises ConfigError if the sizes of the model are not whole blocks.
    """

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        super().__init__(shards, dtype)
        self.dtype = dtype
        inner, hidden = shards.inner, shards.hidden_size
        if inner.full % BLOCK or hidden % BLOCK:
            raise ConfigError(
                f"MXFP4 experts of {hidden} x {inner.full} weights are not whole blocks of {BLOCK}"
            )
        self._first = inner.begin // BLOCK
        count = -(-(inner.begin + inner.local) // BLOCK) - self._first
        experts, rows = shards.num_experts, 2 * inner.local
        self.gate_up = _bytes(experts, rows, hidden // 2)
        self.gate_up_scales = _bytes(experts, rows, hidden // BLOCK)
        self.down = _bytes(experts, hidden, count * _BYTES)
        self.down_scales = _bytes(experts, hidden, count)

    def placements(self, name: str) -> Iterator[Placement]:
        experts, hidden, inner = (
            self.shards.num_experts,
            self.shards.hidden_size,
            self.shards.inner,
        )
        end = -(-inner.end // BLOCK)
        for matrix, rows, columns, convert in (
            ("gate_up", 2 * inner.full, hidden, partial(gate_then_up, inner=inner)),
            ("down", hidden, inner.full, partial(_blocks, first=self._first, end=end)),
        ):
            shape = (experts, rows, columns // BLOCK)
            place = partial(Placement, stored=_STORED)
            yield place(
                f"{self.source}.{matrix}_proj_blocks",
                (*shape, _BYTES),
                f"{name}.{matrix}",
                convert=partial(_flat, convert=convert),
            )
            yield place(
                f"{self.source}.{matrix}_proj_scales",
                shape,
                f"{name}.{matrix}_scales",
                convert=convert,
            )
        yield from super().placements(name)

    def matrices(self) -> tuple[Tensor, Tensor]:
        inner = self.shards.inner
        begin = inner.begin - self._first * BLOCK
        down = dequantise(self.down, self.down_scales, self.dtype)
        gate_up = dequantise(self.gate_up, self.gate_up_scales, self.dtype)
        return gate_up, down[..., begin : begin + inner.local]


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


def _blocks(stored: Tensor, first: int, end: int) -> Tensor:
    """Return the blocks first..end of each row. stored: [E, rows, blocks, ...]."""
    return stored[:, :, first:end]


def _flat(stored: Tensor, convert: Any) -> Tensor:
    part: Tensor = convert(stored)
    return part.flatten(2)
