"""quant_method fp8: DeepSeek's blocks (Qwen3-*-FP8), or one scale for each tensor.

AutoFP8 and transformers (Ministral-3-*-Instruct) both write one scale for each tensor, but under
different names. Only transformers writes the field weight_block_size, with the value null.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from minisgl.core import ConfigError
from minisgl.layers.quantization import Quantization
from minisgl.models.hf_config import read_fields
from minisgl.quantization.format import BLOCK, Fp8Format
from minisgl.quantization.selection import fp8_quantization, names_module


class _Settings(msgspec.Struct, frozen=True):
    """The fields of quantization_config. Checkpoints name the list of ignored modules
    modules_to_not_convert or ignored_layers.

    activation_scheme: minisgl computes a scale for each token with both values.
    """

    fmt: str = "e4m3"
    weight_block_size: list[int] | None = None
    activation_scheme: Literal["dynamic", "static"] = "dynamic"
    modules_to_not_convert: list[str] = []
    ignored_layers: list[str] = []
    modules_to_convert: list[str] = []
    expert_dtype: str = "fp8"


def fine_grained(settings: Mapping[str, Any]) -> Quantization:
    """As QuantizationFactory, for quant_method fp8."""
    fields = read_fields(settings, _Settings, "quantization_config")
    if fields.fmt != "e4m3":
        raise ConfigError(f"quantization_config: fmt {fields.fmt!r} is not supported; use e4m3")
    if fields.weight_block_size not in (None, [BLOCK, BLOCK]):
        raise ConfigError(
            f"quantization_config: weight_block_size {fields.weight_block_size} is not supported; "
            f"supported: [{BLOCK}, {BLOCK}], or none for one scale a tensor"
        )
    if fields.modules_to_convert:
        raise ConfigError("quantization_config: modules_to_convert is not supported")
    if fields.expert_dtype != "fp8":
        raise ConfigError(
            f"quantization_config: expert_dtype {fields.expert_dtype!r} is not supported; use fp8"
        )
    ignored = (*fields.modules_to_not_convert, *fields.ignored_layers)
    names_block_size = "weight_block_size" in settings
    scale = "weight_scale_inv" if names_block_size else "weight_scale"
    form = Fp8Format("tensor" if fields.weight_block_size is None else "block", scale)
    return fp8_quantization(
        lambda name: None if any(names_module(entry, name) for entry in ignored) else form
    )
