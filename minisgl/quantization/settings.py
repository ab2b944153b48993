"""The settings in quantization_config of FP8 checkpoints, by the tools that write them.

Each reader is a QuantizationFactory for one value of quant_method.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from minisgl.core import ConfigError
from minisgl.models.hf_config import Number, check_supported, read_fields
from minisgl.models.quantization import Quantization
from minisgl.quantization.format import BLOCK, Fp8Format
from minisgl.quantization.selection import Group, fp8_quantization

_WHERE = "quantization_config"
_BLOCKS = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")
_ALL = ["Linear"]


class _FineGrained(msgspec.Struct, frozen=True):
    """quant_method fp8. Checkpoints name the list of ignored modules modules_to_not_convert or
    ignored_layers.

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
    """quant_method fp8: DeepSeek's blocks (Qwen3-*-FP8), or one scale for each tensor.

    AutoFP8 and transformers (Ministral-3-*-Instruct) both write one scale for each tensor, but
    under different names. Only transformers writes the field weight_block_size, with the value
    null.
    """
    fields = read_fields(settings, _FineGrained, _WHERE)
    check_supported(f"{_WHERE}: fmt", fields.fmt, ["e4m3"])
    blocks = fields.weight_block_size
    check_supported(f"{_WHERE}: weight_block_size", blocks, [[BLOCK, BLOCK], None])
    check_supported(f"{_WHERE}: modules_to_convert", fields.modules_to_convert, [[]])
    check_supported(f"{_WHERE}: expert_dtype", fields.expert_dtype, ["fp8"])
    scale = "weight_scale_inv" if "weight_block_size" in settings else "weight_scale"
    form = Fp8Format("tensor" if blocks is None else "block", scale)
    ignored = [*fields.modules_to_not_convert, *fields.ignored_layers]
    return fp8_quantization((ignored, None), (_ALL, form))


class _Fbgemm(msgspec.Struct, frozen=True):
    """quant_method fbgemm_fp8.

    activation_scale_ub: a limit on the activations. minisgl checks its type and ignores its value,
    because it computes the scale of each token from the token's largest number.
    """

    activation_scale_ub: Number = 1200.0
    modules_to_not_convert: list[str] = []


def fbgemm(settings: Mapping[str, Any]) -> Quantization:
    """quant_method fbgemm_fp8: one scale for each output feature (Llama-3.1-405B-Instruct-FP8)."""
    fields = read_fields(settings, _Fbgemm, _WHERE)
    return fp8_quantization((fields.modules_to_not_convert, None), (_ALL, Fp8Format("channel")))


class _ModelOpt(msgspec.Struct, frozen=True):
    """quant_method modelopt, or `quantization` in hf_quant_config.json.

    config.json names the excluded modules `ignore`; hf_quant_config.json, which models/config.py
    reads in its place, names them `exclude_modules`.
    """

    quant_algo: str
    ignore: list[str] = []
    exclude_modules: list[str] = []


def modelopt(settings: Mapping[str, Any]) -> Quantization:
    """quant_method modelopt: NVIDIA ModelOpt's FP8, one scale for each tensor."""
    fields = read_fields(settings, _ModelOpt, _WHERE)
    check_supported(f"{_WHERE}: quant_algo", fields.quant_algo, ["FP8"])
    ignored = [*fields.ignore, *fields.exclude_modules]
    return fp8_quantization((ignored, None), (_ALL, Fp8Format("tensor")))


class _Scheme(msgspec.Struct, frozen=True):
    """weights or input_activations of a group."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    block_structure: Any = None


class _GroupSettings(msgspec.Struct, frozen=True):
    targets: list[str]
    weights: dict[str, Any] = {}
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None


class _CompressedTensors(msgspec.Struct, frozen=True):
    """quant_method compressed-tensors. kv_cache_scheme is not read: see --kv-cache-dtype."""

    format: str = "float-quantized"
    config_groups: dict[str, dict[str, Any]] = {}
    ignore: list[str] = []
    sparsity_config: dict[str, Any] = {}
    transform_config: dict[str, Any] = {}


def compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    """quant_method compressed-tensors: llm-compressor's FP8 (RedHatAI/*-FP8-dynamic)."""
    fields = read_fields(settings, _CompressedTensors, _WHERE)
    check_supported(f"{_WHERE}: format", fields.format, ["float-quantized"])
    check_supported(f"{_WHERE}: transform_config", fields.transform_config, [{}])
    sparsity = fields.sparsity_config.get("format", "dense")
    check_supported(f"{_WHERE}: format of sparsity_config", sparsity, ["dense"])
    groups = [_group(name, group) for name, group in fields.config_groups.items()]
    return fp8_quantization((fields.ignore, None), *groups)


def _group(name: str, settings: Mapping[str, Any]) -> Group:
    """Return the targets and the format of one group. Raises ConfigError."""
    where = f"{_WHERE}.config_groups.{name}"
    group = read_fields(settings, _GroupSettings, where)
    weights = _fp8_scheme(group.weights, f"{where}.weights")
    if group.input_activations is None:
        raise ConfigError(f"{where}: input_activations null is not supported; use 8-bit float")
    _fp8_scheme(group.input_activations, f"{where}.input_activations")
    check_supported(f"{where}: output_activations", group.output_activations, [None])
    match weights.strategy:
        case "tensor" | "channel":
            return group.targets, Fp8Format(weights.strategy)
        case "block" if weights.block_structure in _BLOCKS:
            return group.targets, Fp8Format("block")
    blocks = f" with block_structure {weights.block_structure}" if weights.block_structure else ""
    raise ConfigError(
        f"{where}.weights: strategy {weights.strategy!r}{blocks} is not supported; "
        f"supported: tensor, channel, block with block_structure [{BLOCK}, {BLOCK}]"
    )


def _fp8_scheme(settings: Mapping[str, Any], where: str) -> _Scheme:
    scheme = read_fields(settings, _Scheme, where)
    if (scheme.num_bits, scheme.type, scheme.symmetric) != (8, "float", True):
        raise ConfigError(
            f"{where}: num_bits {scheme.num_bits}, type {scheme.type}, symmetric "
            f"{scheme.symmetric} is not supported; supported: 8, float, True"
        )
    return scheme
