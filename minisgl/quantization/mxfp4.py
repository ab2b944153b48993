"""MXFP4: experts of gpt-oss with 4 bits for a weight.

minisgl.kernel.mxfp4_weights describes the storage. All other weights of these checkpoints are
unquantised. The activations keep their dtype.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minisgl.core import ConfigError
from minisgl.kernel.mxfp4_weights import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK_BLOCKS,
    by_chunks,
    num_chunks,
    recode,
)
from minisgl.layers.experts import ExpertShards
from minisgl.layers.linear import UnquantizedLinear
from minisgl.layers.quantization import Quantization
from minisgl.layers.shards import Placement
from minisgl.layers.stacked_experts import StackedExperts, gate_then_up
from minisgl.moe.base import ExpertWeights

Rows = Callable[[Tensor], Tensor]

_STORED = ("U8",)


def mxfp4(settings: Mapping[str, Any]) -> Quantization:
    """The methods of a checkpoint whose quant_method is mxfp4."""
    return Quantization(UnquantizedLinear, stacked_experts=Mxfp4Experts)


class Mxfp4Experts(StackedExperts):
    """Matrices in MXFP4.

    gate_up: uint8 [E, chunks of H, 2I, 64]; down: uint8 [E, chunks of I, H, 64], both of `recode`
    and `by_chunks`; each with its scales, uint8, 4 in place of the 64. The ranks share whole blocks
    of the inner dimension. Raises ConfigError if the sizes of the model are not whole blocks.
    """

    def __init__(self, shards: ExpertShards, dtype: torch.dtype) -> None:
        hidden, full = shards.hidden_size, shards.inner.full
        if full % BLOCK or hidden % BLOCK:
            raise ConfigError(
                f"MXFP4 experts of {hidden} x {full} weights are not whole blocks of {BLOCK}"
            )
        super().__init__(shards.in_units(BLOCK), dtype)
        experts, inner = shards.num_experts, self.shards.inner.local
        gate_up = experts, num_chunks(hidden), 2 * inner
        down = experts, num_chunks(inner), hidden
        self.gate_up = _bytes(*gate_up, CHUNK_BLOCKS * BLOCK_BYTES)
        self.gate_up_scales = _bytes(*gate_up, CHUNK_BLOCKS)
        self.down = _bytes(*down, CHUNK_BLOCKS * BLOCK_BYTES)
        self.down_scales = _bytes(*down, CHUNK_BLOCKS)

    def placements(self, name: str) -> Iterator[Placement]:
        experts, hidden, inner = self.shards.sizes
        gate_up = (experts, 2 * inner.full, hidden // BLOCK)
        down = (experts, hidden, inner.full // BLOCK)
        rows = partial(gate_then_up, inner=inner)
        cut = (2, inner.begin // BLOCK, inner.end // BLOCK)
        place = partial(Placement, stored=_STORED)
        source = f"{self.source}.gate_up_proj"
        codes, scales = partial(_codes, rows=rows), partial(_scales, rows=rows)
        yield place(f"{source}_blocks", (*gate_up, BLOCK_BYTES), f"{name}.gate_up", convert=codes)
        yield place(f"{source}_scales", gate_up, f"{name}.gate_up_scales", convert=scales)
        source = f"{self.source}.down_proj"
        blocks = (*down, BLOCK_BYTES)
        yield place(f"{source}_blocks", blocks, f"{name}.down", *cut, convert=_codes)
        yield place(f"{source}_scales", down, f"{name}.down_scales", *cut, convert=_scales)
        yield from super().placements(name)

    def weights(self, router: Tensor) -> ExpertWeights:
        scales = (self.gate_up_scales, self.down_scales)
        return super().weights(router)._replace(mxfp4_scales=scales)

    def matrices(self) -> tuple[Tensor, Tensor]:
        return self.gate_up, self.down


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


def _codes(stored: Tensor, rows: Rows | None = None) -> Tensor:
    """Return codes in the order of the engine. stored: [E, rows, blocks, 16]. rows: orders them."""
    return by_chunks(recode(_ordered(stored, rows).flatten(2)), BLOCK_BYTES)


def _scales(stored: Tensor, rows: Rows | None = None) -> Tensor:
    """Return scales in the order of the engine. stored: [E, rows, blocks]. rows: as in _codes."""
    return by_chunks(_ordered(stored, rows), 1)


def _ordered(stored: Tensor, rows: Rows | None) -> Tensor:
    return stored if rows is None else rows(stored)
