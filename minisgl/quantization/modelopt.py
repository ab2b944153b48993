"""quant_method modelopt: NVIDIA ModelOpt's FP8, one scale for each tensor.

config.json names the excluded modules `ignore`; hf_quant_config.json, which models/config.py reads
in its place, names them `exclude_modules`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.layers.quantization import Quantization
from minisgl.models.hf_config import read_fields
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.selection import fp8_quantization, matches_wildcard


class _Settings(msgspec.Struct, frozen=True):
    """The fields of quantization_config, or of `quantization` in hf_quant_config.json."""

    quant_algo: str
    ignore: list[str] = []
    exclude_modules: list[str] = []


def modelopt(settings: Mapping[str, Any]) -> Quantization:
    """As QuantizationFactory, for quant_method modelopt."""
    fields = read_fields(settings, _Settings, "quantization_config")
    if fields.quant_algo != "FP8":
        raise ConfigError(
            f"quantization_config: quant_algo {fields.quant_algo!r} of modelopt is not supported; "
            "supported: FP8"
        )
    excluded = (*fields.ignore, *fields.exclude_modules)
    form = Fp8Format("tensor")
    return fp8_quantization(
        lambda name: None if any(matches_wildcard(entry, name) for entry in excluded) else form
    )
