"""MXFP4: experts of gpt-oss with 4 bits for a weight.

minisgl.kernel.mxfp4_weights describes the storage. All other weights of these checkpoints are
unquantised. The activations keep their dtype.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.kernel.mxfp4_weights import BLOCK, BLOCK_BYTES, recode
from minisgl.layers.experts import ExpertShards
from minisgl.layers.linear import UnquantizedLinear
from minisgl.layers.quantization import Quantization
from minisgl.layers.shards import Placement
from minisgl.layers.stacked_experts import StackedExperts, gate_then_up
from minisgl.moe.base import ExpertWeights

_STORED = ("U8",)


def mxfp4(settings: Mapping[str, Any]) -> Quantization:
    """The methods of a checkpoint whose quant_method is mxfp4."""
    return Quantization(UnquantizedLinear, stacked_experts=Mxfp4Experts)


class Mxfp4Experts(StackedExperts):
    """Matrices in MXFP4.

    gate_up: uint8 [E, 2I, H / 2]; down: uint8 [E, H, I / 2], both in the order of `recode`; each
    with its scales, uint8, one for each block. The ranks share whole blocks of the inner dimension.
    Raises ConfigError if the sizes of the model are not whole blocks.
    """

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        hidden, full = shards.hidden_size, shards.inner.full
        if full % BLOCK or hidden % BLOCK:
            raise ConfigError(
                f"MXFP4 experts of {hidden} x {full} weights are not whole blocks of {BLOCK}"
            )
        super().__init__(shards.in_units(BLOCK), dtype)
        experts, inner = shards.num_experts, self.shards.inner.local
        self.gate_up = _bytes(experts, 2 * inner, hidden // 2)
        self.gate_up_scales = _bytes(experts, 2 * inner, hidden // BLOCK)
        self.down = _bytes(experts, hidden, inner // 2)
        self.down_scales = _bytes(experts, hidden, inner // BLOCK)

    def placements(self, name: str) -> Iterator[Placement]:
        experts, hidden, inner = self.shards.sizes
        gate_up = (experts, 2 * inner.full, hidden // BLOCK)
        down = (experts, hidden, inner.full // BLOCK)
        rows = partial(gate_then_up, inner=inner)
        cut = (2, inner.begin // BLOCK, inner.end // BLOCK)
        place = partial(Placement, stored=_STORED)
        source = f"{self.source}.gate_up_proj"
        codes = partial(_join_and_recode, convert=rows)
        yield place(f"{source}_blocks", (*gate_up, BLOCK_BYTES), f"{name}.gate_up", convert=codes)
        yield place(f"{source}_scales", gate_up, f"{name}.gate_up_scales", convert=rows)
        source = f"{self.source}.down_proj"
        yield place(
            f"{source}_blocks", (*down, BLOCK_BYTES), f"{name}.down", *cut, convert=_join_and_recode
        )
        yield place(f"{source}_scales", down, f"{name}.down_scales", *cut)
        yield from super().placements(name)

    def weights(self, router: Tensor) -> ExpertWeights:
        scales = (self.gate_up_scales, self.down_scales)
        return super().weights(router)._replace(mxfp4_scales=scales)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


def _join_and_recode(stored: Tensor, convert: Any = None) -> Tensor:
    """Join the bytes of a row's blocks, and recode them. stored: [E, rows, blocks, 16]."""
    part: Tensor = stored if convert is None else convert(stored)
    return recode(part.flatten(2))
