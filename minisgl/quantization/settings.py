"""The settings in quantization_config of checkpoints, by the tools that write them.

Each reader is a QuantizationFactory for one value of quant_method.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from minisgl.core import ConfigError
from minisgl.models.hf_config import Number, check_supported, read_fields
from minisgl.models.quantization import Quantization
from minisgl.quantization.format import BLOCK, Fp8Format
from minisgl.quantization.integers import pack_quantized
from minisgl.quantization.nvfp4 import GROUP, modelopt_nvfp4, nvfp4_pack_quantized
from minisgl.quantization.packed import PackedFormat, group_of
from minisgl.quantization.selection import ALL, Group, quantization

_WHERE = "quantization_config"
_BLOCKS = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")


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
    return quantization((ignored, None), (ALL, form))


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
    return quantization((fields.modules_to_not_convert, None), (ALL, Fp8Format("channel")))


class _ModelOpt(msgspec.Struct, frozen=True):
    """quant_method modelopt, or `quantization` in hf_quant_config.json.

    config.json names the excluded modules `ignore`; hf_quant_config.json, which models/config.py
    reads in its place, names them `exclude_modules`.
    """

    quant_algo: str
    group_size: int | None = None
    ignore: list[str] = []
    exclude_modules: list[str] = []


def modelopt(settings: Mapping[str, Any]) -> Quantization:
    """quant_method modelopt: NVIDIA ModelOpt's FP8, one scale for each tensor, and its NVFP4."""
    fields = read_fields(settings, _ModelOpt, _WHERE)
    formats: dict[str, Fp8Format | PackedFormat] = {
        "FP8": Fp8Format("tensor"),
        "NVFP4": modelopt_nvfp4(),
    }
    check_supported(f"{_WHERE}: quant_algo", fields.quant_algo, formats)
    check_supported(f"{_WHERE}: group_size", fields.group_size, [None, GROUP])
    ignored = [*fields.ignore, *fields.exclude_modules]
    return quantization((ignored, None), (ALL, formats[fields.quant_algo]))


class _Scheme(msgspec.Struct, frozen=True):
    """weights or input_activations of a group."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    block_structure: Any = None
    group_size: int | None = None
    actorder: str | bool | None = None

    @property
    def kind(self) -> tuple[int, str, bool]:
        return self.num_bits, self.type, self.symmetric


class _GroupSettings(msgspec.Struct, frozen=True):
    """format: of this group, in checkpoints whose groups have different formats."""

    targets: list[str]
    weights: dict[str, Any] = {}
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class _CompressedTensors(msgspec.Struct, frozen=True):
    """quant_method compressed-tensors. kv_cache_scheme is not read: see --kv-cache-dtype."""

    format: str = "float-quantized"
    config_groups: dict[str, dict[str, Any]] = {}
    ignore: list[str] = []
    sparsity_config: dict[str, Any] = {}
    transform_config: dict[str, Any] = {}


def compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    """quant_method compressed-tensors: RedHatAI/*-FP8-dynamic, *-quantized.w4a16, *-NVFP4."""
    fields = read_fields(settings, _CompressedTensors, _WHERE)
    check_supported(f"{_WHERE}: transform_config", fields.transform_config, [{}])
    sparsity = fields.sparsity_config.get("format", "dense")
    check_supported(f"{_WHERE}: format of sparsity_config", sparsity, ["dense"])
    groups = [_group(name, group, fields.format) for name, group in fields.config_groups.items()]
    return quantization((fields.ignore, None), *groups)


# Returns the format of a group of linears, whose full name in the settings is the last argument.
_Reader = Callable[[_GroupSettings, _Scheme, str], Fp8Format | PackedFormat]


def _group(name: str, settings: Mapping[str, Any], form: str) -> Group:
    """Return the targets and the format of one group. form: of the file. Raises ConfigError."""
    where = f"{_WHERE}.config_groups.{name}"
    group = read_fields(settings, _GroupSettings, where)
    readers: dict[str, _Reader] = {
        "float-quantized": _fp8_group,
        "pack-quantized": _int4_group,
        "nvfp4-pack-quantized": _nvfp4_group,
    }
    form = group.format or form
    check_supported(f"{_WHERE}: format", form, readers)
    check_supported(f"{where}: output_activations", group.output_activations, [None])
    weights = read_fields(group.weights, _Scheme, f"{where}.weights")
    return group.targets, readers[form](group, weights, where)


def _fp8_group(group: _GroupSettings, weights: _Scheme, where: str) -> Fp8Format:
    _check_kind(weights, f"{where}.weights", (8, "float", True))
    if group.input_activations is None:
        raise ConfigError(f"{where}: input_activations null is not supported; use 8-bit float")
    inputs = read_fields(group.input_activations, _Scheme, f"{where}.input_activations")
    _check_kind(inputs, f"{where}.input_activations", (8, "float", True))
    match weights.strategy:
        case "tensor" | "channel":
            return Fp8Format(weights.strategy)
        case "block" if weights.block_structure in _BLOCKS:
            return Fp8Format("block")
    blocks = f" with block_structure {weights.block_structure}" if weights.block_structure else ""
    raise ConfigError(
        f"{where}.weights: strategy {weights.strategy!r}{blocks} is not supported; "
        f"supported: tensor, channel, block with block_structure [{BLOCK}, {BLOCK}]"
    )


def _int4_group(group: _GroupSettings, weights: _Scheme, where: str) -> PackedFormat:
    _check_kind(weights, f"{where}.weights", (4, "int", True), (4, "int", False))
    check_supported(f"{where}: input_activations", group.input_activations, [None])
    check_supported(f"{where}.weights: strategy", weights.strategy, ["group", "channel"])
    orders = {None: False, False: False, "weight": False, "static": False}
    orders |= {True: True, "group": True, "dynamic": True}
    check_supported(f"{where}.weights: actorder", weights.actorder, orders)
    is_grouped = weights.strategy == "group"
    size = group_of(weights.group_size or 0) if is_grouped else None
    return pack_quantized(size, weights.symmetric, is_grouped and orders[weights.actorder])


def _nvfp4_group(group: _GroupSettings, weights: _Scheme, where: str) -> PackedFormat:
    """minisgl does not quantise the activations: input_activations may be null or NVFP4."""
    _check_kind(weights, f"{where}.weights", (4, "float", True))
    check_supported(f"{where}.weights: group_size", weights.group_size, [GROUP])
    return nvfp4_pack_quantized()


def _check_kind(scheme: _Scheme, where: str, *supported: tuple[int, str, bool]) -> None:
    if scheme.kind not in supported:
        bits, kind, symmetric = scheme.kind
        names = " or ".join(", ".join(map(str, each)) for each in supported)
        raise ConfigError(
            f"{where}: num_bits {bits}, type {kind}, symmetric {symmetric} is not supported; "
            f"supported: {names}"
        )
