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
from minisgl.kernel.mxfp4_weights import (
    BLOCK,
    BLOCK_BYTES,
    CHUNK_BLOCKS,
    by_chunks,
    num_chunks,
    recode,
)
from minisgl.layers.linear import UnquantizedLinear
from minisgl.layers.shards import Placement, Shard
from minisgl.models.quantization import Quantization, StoredWeights
from minisgl.moe.base import ExpertWeights
from minisgl.moe.experts import ExpertShards
from minisgl.moe.stacked_experts import StackedExperts, gate_then_up

_STORED = ("U8",)
_RANDOM_SCALE = 120  # 2^-7 as a byte: random weights then have the deviation of other families'


def mxfp4(settings: Mapping[str, Any]) -> Quantization:
    """The methods of a checkpoint whose quant_method is mxfp4."""
    bits = 8 * (BLOCK_BYTES + 1) / BLOCK  # a block has a scale of one byte
    stored = StoredWeights("mxfp4", bits, linears=False)
    return Quantization(UnquantizedLinear, stacked_experts=Mxfp4Experts, stored=stored)


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
        cut = (2, inner.begin // BLOCK, inner.end // BLOCK)
        place = partial(Placement, stored=_STORED)
        source, convert_gate_up = self.source, partial(_in_engine_order, gate_up=inner)
        for part, suffix, block, constant in (
            ("blocks", "", (BLOCK_BYTES,), None),
            ("scales", "_scales", (), _RANDOM_SCALE),
        ):
            tensor, target = f"{source}.gate_up_proj_{part}", f"{name}.gate_up{suffix}"
            rows = (*gate_up, *block)
            yield place(tensor, rows, target, convert=convert_gate_up, constant=constant)
            tensor, target = f"{source}.down_proj_{part}", f"{name}.down{suffix}"
            place_down = partial(place, convert=_in_engine_order, constant=constant)
            yield place_down(tensor, (*down, *block), target, *cut)
        yield from super().placements(name)

    def weights(self) -> ExpertWeights:
        gate_up, down, _ = super().weights()
        gate_up = gate_up._replace(scales=self.gate_up_scales)
        return ExpertWeights(gate_up, down._replace(scales=self.down_scales))


def _bytes(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=torch.uint8), requires_grad=False)


def _in_engine_order(stored: Tensor, gate_up: Shard | None = None) -> Tensor:
    """Return codes or scales in the order of the engine.

    stored: codes [E, rows, blocks, 16] or scales [E, rows, blocks]. gate_up: this rank's range of
    the intermediate size, for tensors whose rows alternate between gate and up.
    """
    ordered = stored if gate_up is None else gate_then_up(stored, gate_up)
    if ordered.dim() == 3:
        return by_chunks(ordered, 1)
    return by_chunks(recode(ordered.flatten(2)), BLOCK_BYTES)
