"""AWQ: int4 weights with zeros, of quant_method awq in the order of its GEMM kernels."""

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from minisgl.layers.shards import FLOATS
from minisgl.models.hf_config import check_supported, read_fields
from minisgl.models.quantization import Quantization
from minisgl.quantization.packed import (
    RANDOM_SCALE,
    PackedFormat,
    StoredTensor,
    from_words,
    group_of,
    transposed,
)
from minisgl.quantization.selection import ALL, quantization

_WHERE = "quantization_config"
# The place in a word of each of 8 neighbouring output features.
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class _Awq(msgspec.Struct, frozen=True):
    """quant_method awq."""

    bits: int = 4
    group_size: int = 128
    zero_point: bool = True
    version: str = "gemm"
    modules_to_not_convert: list[str] = []


def awq(settings: Mapping[str, Any]) -> Quantization:
    """quant_method awq: AutoAWQ (Qwen3-*-AWQ)."""
    fields = read_fields(settings, _Awq, _WHERE)
    check_supported(f"{_WHERE}: bits", fields.bits, [4])
    check_supported(f"{_WHERE}: version", fields.version.lower(), ["gemm"])
    check_supported(f"{_WHERE}: zero_point", fields.zero_point, [True])
    form = PackedFormat(
        "AWQ",
        group_of(fields.group_size),
        codes=StoredTensor("qweight", _rows, rows_at=1, rows=8, columns=1),
        scales=StoredTensor("scales", transposed, FLOATS, rows_at=1, constant=RANDOM_SCALE),
        zeros=StoredTensor("qzeros", _rows, rows_at=1, rows=8),
    )
    return quantization((fields.modules_to_not_convert, None), (ALL, form))


def _rows(words: Tensor) -> Tensor:
    """words: int32 [columns or groups, rows / 8]. Returns uint8 [rows, columns or groups]."""
    return from_words(words, 1, _ORDER).T
