"""int4 weights of compressed-tensors (format pack-quantized), and of --quantization int4."""

from functools import partial

import torch
from torch import Tensor

from minisgl.kernel.packed_weights import SYMMETRIC_ZERO
from minisgl.layers.shards import FLOATS
from minisgl.quantization.packed import (
    RANDOM_SCALE,
    PackedFormat,
    StoredTensor,
    as_stored,
    from_words,
)

_ONLINE_GROUP = 128


def pack_quantized(group: int | None, symmetric: bool, activation_order: bool) -> PackedFormat:
    """The format of llm-compressor's W4A16 schemes. activation_order: actorder is group."""
    zeros = StoredTensor("weight_zero_point", partial(from_words, dim=0), rows=8)
    return PackedFormat(
        "compressed-tensors",
        group,
        codes=StoredTensor("weight_packed", partial(from_words, dim=1), columns=8),
        scales=StoredTensor("weight_scale", as_stored, FLOATS, constant=RANDOM_SCALE),
        zeros=None if symmetric else zeros,
        column_groups="weight_g_idx" if activation_order else None,
    )


def online_int4() -> PackedFormat:
    """Unquantised weights, rounded at load to the nearest code of a symmetric group of 128."""
    return PackedFormat(
        "int4",
        _ONLINE_GROUP,
        codes=StoredTensor("weight", _codes, FLOATS, columns=1),
        scales=StoredTensor("weight", _scales, FLOATS, columns=1),
        remedy="use --quantization fp8, or leave out --quantization",
    )


def _scales(weight: Tensor) -> Tensor:
    """Return the scale of each group, float32 [rows, groups]. weight: [rows, columns].

    The codes reach from 8 below the zero to 7 above it. Half a step beyond them is clamped.
    """
    largest = weight.float().view(len(weight), -1, _ONLINE_GROUP).abs().amax(-1)
    return (largest / (SYMMETRIC_ZERO - 0.5)).clamp_min(1e-12)


def _codes(weight: Tensor) -> Tensor:
    scaled = weight.float().view(len(weight), -1, _ONLINE_GROUP) / _scales(weight).unsqueeze(-1)
    codes = (scaled.round() + SYMMETRIC_ZERO).clamp(0, 2 * SYMMETRIC_ZERO - 1)
    return codes.to(torch.uint8).flatten(1)
