"""GPTQ: int4 weights of quant_method gptq, as AutoGPTQ and GPTQModel write them."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import msgspec
from torch import Tensor

from minisgl.core import ConfigError
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
from minisgl.quantization.selection import ALL, Group, quantization

_WHERE = "quantization_config"


class _Gptq(msgspec.Struct, frozen=True):
    """quant_method gptq.

    desc_act: the groups have the columns in the order of their importance (activation order).
    sym: the zero of all groups is 8.
    checkpoint_format: gptq stores zeros minus 1, gptq_v2 the zeros.
    dynamic: settings by expressions for modules. An expression that begins with "-:" excludes them.
    modules_in_block_to_quantize: the only modules that are quantised.
    """

    bits: int = 4
    group_size: int = 128
    desc_act: bool = False
    sym: bool = True
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    lm_head: bool = False
    dynamic: dict[str, dict[str, Any]] = {}
    modules_in_block_to_quantize: list[list[str]] = []
    modules_to_not_convert: list[str] = []


def gptq(settings: Mapping[str, Any]) -> Quantization:
    """quant_method gptq: Qwen3-*-GPTQ-Int4."""
    fields = read_fields(settings, _Gptq, _WHERE)
    check_supported(f"{_WHERE}: bits", fields.bits, [4])
    check_supported(f"{_WHERE}: lm_head", fields.lm_head, [False])
    first = int(fields.checkpoint_format == "gptq")
    zeros = StoredTensor("qzeros", partial(_zeros, first=first), rows_at=1, rows=8)
    form = PackedFormat(
        "GPTQ",
        group_of(fields.group_size),
        codes=StoredTensor("qweight", _codes, rows_at=1, columns=8),
        scales=StoredTensor("scales", transposed, FLOATS, rows_at=1, constant=RANDOM_SCALE),
        zeros=None if fields.sym else zeros,
        column_groups="g_idx" if fields.desc_act else None,
    )
    unused = [] if fields.desc_act else [".g_idx"]
    if fields.sym:
        unused.append(".qzeros")
    ignored = [*fields.modules_to_not_convert, *_excluded(fields.dynamic)]
    chosen = [name for names in fields.modules_in_block_to_quantize for name in names]
    groups: list[Group] = [(ignored, None), (chosen or ALL, form)]
    return quantization(*groups, unused=unused)


def _excluded(dynamic: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the entries of excluded modules. Raises ConfigError for other settings of modules."""
    for expression, settings in dynamic.items():
        if settings and not expression.startswith("-:"):
            raise ConfigError(
                f"{_WHERE}: dynamic has settings for {expression!r}; supported: expressions that "
                'begin with "-:", which exclude modules'
            )
    return [f"re:{name[2:]}" for name in dynamic if name.startswith("-:")]


def _codes(words: Tensor) -> Tensor:
    """words: int32 [columns / 8, rows]. Returns uint8 [rows, columns]."""
    return from_words(words, 0).T


def _zeros(words: Tensor, first: int) -> Tensor:
    """words: int32 [groups, rows / 8]. Returns uint8 [rows, groups], the codes plus `first`."""
    return from_words(words, 1).T + first & 15
