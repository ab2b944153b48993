"""quant_method fbgemm_fp8: one scale for each output feature (Llama-3.1-405B-Instruct-FP8)."""

from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.layers.quantization import Quantization
from minisgl.models.hf_config import Number, read_fields
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.selection import fp8_quantization, names_module


class _Settings(msgspec.Struct, frozen=True):
    """The fields of quantization_config.

    activation_scale_ub: a limit on the activations. minisgl checks its type and ignores its value,
    because it computes the scale of each token from the token's largest number.
    """

    activation_scale_ub: Number = 1200.0
    modules_to_not_convert: list[str] = []


def fbgemm(settings: Mapping[str, Any]) -> Quantization:
    """As QuantizationFactory, for quant_method fbgemm_fp8."""
    ignored = read_fields(settings, _Settings, "quantization_config").modules_to_not_convert
    form = Fp8Format("channel")
    return fp8_quantization(
        lambda name: None if any(names_module(entry, name) for entry in ignored) else form
    )
