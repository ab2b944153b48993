"""quant_method compressed-tensors: FP8 checkpoints of llm-compressor (RedHatAI/*-FP8-dynamic)."""

from collections.abc import Mapping
from typing import Any

import msgspec

from minisgl.core import ConfigError
from minisgl.layers.quantization import Quantization
from minisgl.models.hf_config import read_fields
from minisgl.quantization.format import BLOCK, Fp8Format
from minisgl.quantization.selection import fp8_quantization, matches_target

_WHERE = "quantization_config"
_BLOCKS = ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}")


class _Scheme(msgspec.Struct, frozen=True):
    """weights or input_activations of a group."""

    num_bits: int = 8
    type: str = "int"
    strategy: str | None = None
    symmetric: bool = True
    block_structure: Any = None


class _Group(msgspec.Struct, frozen=True):
    targets: list[str]
    weights: dict[str, Any] = {}
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None


class _Settings(msgspec.Struct, frozen=True):
    """The fields of quantization_config. kv_cache_scheme is not read: see --kv-cache-dtype."""

    format: str = "float-quantized"
    config_groups: dict[str, dict[str, Any]] = {}
    ignore: list[str] = []
    sparsity_config: dict[str, Any] = {}
    transform_config: dict[str, Any] = {}


def compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    """As QuantizationFactory, for quant_method compressed-tensors."""
    fields = read_fields(settings, _Settings, _WHERE)
    if fields.format != "float-quantized":
        raise ConfigError(
            f"{_WHERE}: format {fields.format!r} of compressed-tensors is not supported; "
            "supported: float-quantized"
        )
    if fields.transform_config:
        raise ConfigError(f"{_WHERE}: transform_config is not supported")
    if fields.sparsity_config.get("format", "dense") != "dense":
        raise ConfigError(f"{_WHERE}: sparsity_config is not supported; supported: dense weights")
    groups = [_group(name, group) for name, group in fields.config_groups.items()]

    def format_of(linear: str) -> Fp8Format | None:
        if any(matches_target(entry, linear) for entry in fields.ignore):
            return None
        found = (
            form
            for targets, form in groups
            if any(matches_target(target, linear) for target in targets)
        )
        return next(found, None)

    return fp8_quantization(format_of)


def _group(name: str, settings: Mapping[str, Any]) -> tuple[list[str], Fp8Format]:
    """Return the targets and the format of one group. Raises ConfigError."""
    where = f"{_WHERE}.config_groups.{name}"
    group = read_fields(settings, _Group, where)
    weights = read_fields(group.weights, _Scheme, f"{where}.weights")
    _check_fp8(weights, f"{where}.weights")
    if group.input_activations is None:
        raise ConfigError(f"{where}: input_activations null is not supported; use 8-bit float")
    inputs = read_fields(group.input_activations, _Scheme, f"{where}.input_activations")
    _check_fp8(inputs, f"{where}.input_activations")
    if group.output_activations is not None:
        raise ConfigError(f"{where}: output_activations is not supported")
    match weights.strategy:
        case "tensor":
            return group.targets, Fp8Format("tensor")
        case "channel":
            return group.targets, Fp8Format("channel")
        case "block" if weights.block_structure in _BLOCKS:
            return group.targets, Fp8Format("block")
    blocks = f" with block_structure {weights.block_structure}" if weights.block_structure else ""
    raise ConfigError(
        f"{where}.weights: strategy {weights.strategy!r}{blocks} is not supported; "
        f"supported: tensor, channel, block with block_structure [{BLOCK}, {BLOCK}]"
    )


def _check_fp8(scheme: _Scheme, where: str) -> None:
    if (scheme.num_bits, scheme.type, scheme.symmetric) != (8, "float", True):
        raise ConfigError(
            f"{where}: num_bits {scheme.num_bits}, type {scheme.type}, symmetric "
            f"{scheme.symmetric} is not supported; supported: 8, float, True"
        )
