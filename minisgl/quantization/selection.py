"""The choice of the quantised linears of a checkpoint, from its lists of ignored modules."""

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch

from minisgl.core import ConfigError
from minisgl.layers.experts import ExpertShards, ExpertsMethod, UnquantizedExperts
from minisgl.layers.linear import LinearMethod, UnquantizedLinear
from minisgl.layers.quantization import Quantization
from minisgl.layers.shards import LinearShards
from minisgl.quantization.experts import Fp8Experts
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.linear import Fp8Linear

# Tensors that FP8 checkpoints may have and that the model does not read. Activations are quantised
# with a scale for each token, which needs no calibration. Keys and values have scales of their own.
_UNUSED = (
    *(".input_scale", ".input_scale_ub", ".activation_scale"),
    *(".q_scale", ".k_scale", ".v_scale"),
)

# Returns the format of the linear with this full name; None if it is not quantised.
FormatOf = Callable[[str], Fp8Format | None]


def fp8_quantization(format_of: FormatOf) -> Quantization:
    """Return the methods of a checkpoint whose linears have the formats `format_of`.

    They raise ConfigError if linears that the model merges, or the experts of a layer, have
    different formats.
    """

    def linear(shards: LinearShards, dtype: torch.dtype) -> LinearMethod:
        form = _common(shards.parent, shards.names, format_of)
        return UnquantizedLinear(shards, dtype) if form is None else Fp8Linear(shards, dtype, form)

    def experts(shards: ExpertShards, dtype: torch.dtype) -> ExpertsMethod:
        form = _common(f"{shards.parent}.experts", shards.names, format_of)
        return (
            UnquantizedExperts(shards, dtype) if form is None else Fp8Experts(shards, dtype, form)
        )

    return Quantization(linear, experts, _UNUSED)


def _common(parent: str, names: Sequence[str], format_of: FormatOf) -> Fp8Format | None:
    forms = {format_of(name) for name in names}
    if len(forms) > 1:
        raise ConfigError(
            f"quantization_config gives the linears of {parent} different formats, but minisgl "
            f"merges {names[0]} with others: give all of them the same format"
        )
    return forms.pop()


def names_module(entry: str, name: str) -> bool:
    """Whether an entry of a list of ignored modules names this linear or a module around it.

    An entry is a full name, or a part of one: "lm_head", "mlp.gate", "model.layers.0".
    """
    return f".{entry}." in f".{name}."


def matches_wildcard(entry: str, name: str) -> bool:
    """As `names_module`, where * stands for any characters (ModelOpt)."""
    return fnmatchcase(name, entry) or names_module(entry, name)


def matches_target(entry: str, name: str) -> bool:
    """Whether a target of compressed-tensors selects this linear: Linear, a full name, or re:..."""
    if entry.startswith("re:"):
        try:
            return re.match(entry[3:], name) is not None
        except re.error as error:
            raise ConfigError(
                f"quantization_config: {entry!r} is no regular expression: {error}"
            ) from None
    return entry in ("Linear", name)
