"""The choice of the quantised linears of a checkpoint, from its lists of ignored modules."""

import re
from collections.abc import Callable, Sequence
from fnmatch import translate

import torch

from minisgl.core import ConfigError
from minisgl.kernel.packed_order import bits_of
from minisgl.layers.linear import LinearMethod, UnquantizedLinear
from minisgl.layers.shards import LinearShards
from minisgl.models.quantization import Quantization, StoredWeights
from minisgl.models.text_part import text_name
from minisgl.moe.experts import ExpertShards, ExpertsMethod, UnquantizedExperts
from minisgl.quantization.experts import Fp8Experts
from minisgl.quantization.format import Fp8Format
from minisgl.quantization.linear import Fp8Linear
from minisgl.quantization.packed import PackedFormat
from minisgl.quantization.packed_methods import PackedExperts, PackedLinear

# Tensors that checkpoints may have and that the model does not read. Activations are quantised with
# a scale for each token, which needs no calibration, or not at all. Keys and values have scales of
# their own. The shapes of weights follow from config.json.
_UNUSED = (
    *(".input_scale", ".input_scale_ub", ".activation_scale", ".input_global_scale"),
    *(".q_scale", ".k_scale", ".v_scale"),
    ".weight_shape",
)
ALL = ("Linear",)  # selects all linears

# Linears of one format, selected as `_selector` describes it. None: they are not quantised.
Group = tuple[Sequence[str], Fp8Format | PackedFormat | None]


def quantization(*groups: Group, unused: Sequence[str] = ()) -> Quantization:
    """Return the methods of a checkpoint. The first group that selects a linear counts.

    unused: further endings of the names of tensors that the model does not read.

    Raises ConfigError for an entry that is no regular expression. The methods raise it if linears
    that the model merges, or the routed experts of a layer, have different formats.
    """
    rules = [(_selector(entry), form) for entries, form in groups for entry in entries]

    def format_of(name: str) -> Fp8Format | PackedFormat | None:
        return next((form for selects, form in rules if selects(name)), None)

    def common(parent: str, names: Sequence[str]) -> Fp8Format | PackedFormat | None:
        forms = {format_of(name) for name in names}
        if len(forms) > 1:
            raise ConfigError(
                f"quantization_config gives the linears of {parent} different formats, but minisgl "
                f"merges {names[0]} with others: give all of them the same format"
            )
        return forms.pop()

    def linear(shards: LinearShards, dtype: torch.dtype) -> LinearMethod:
        match common(shards.parent, shards.names):
            case Fp8Format() as form:
                return Fp8Linear(shards, dtype, form)
            case PackedFormat() as form:
                return PackedLinear(shards, dtype, form)
        return UnquantizedLinear(shards, dtype)

    def experts(shards: ExpertShards, dtype: torch.dtype) -> ExpertsMethod:
        routed = shards.without_shared()
        form = common(f"{shards.parent}.experts", routed.names)
        # A shared expert of another format has linears of its own.
        if any(format_of(name) != form for name in shards.names):
            shards = routed
        match form:
            case Fp8Format():
                return Fp8Experts(shards, dtype, form)
            case PackedFormat():
                return PackedExperts(shards, dtype, form)
        return UnquantizedExperts(shards, dtype)

    forms = [form for _, form in groups if form is not None]
    stored = min(map(_stored, forms), key=lambda each: each.bits, default=StoredWeights())
    return Quantization(linear, experts, (*_UNUSED, *unused), None, _converted, stored)


def _stored(form: Fp8Format | PackedFormat) -> StoredWeights:
    """The scales of FP8 are not counted."""
    if isinstance(form, Fp8Format):
        return StoredWeights("fp8", 8)
    return StoredWeights(form.kind, bits_of(form.kind, form.group))


def _converted(shards: LinearShards, dtype: torch.dtype) -> LinearMethod:
    """Return the FP8 method of a linear that the checkpoint stores unquantised."""
    return Fp8Linear(shards, dtype, Fp8Format("online"))


def _selector(entry: str) -> Callable[[str], object]:
    """Return a function that tells whether an entry selects the linear with a full name.

    An entry is a full name, or whole parts of one: "lm_head", "mlp.gate", "model.layers.0". An
    entry with * for any characters is a full name (ModelOpt). "re:" begins a regular expression,
    and "Linear" selects all linears (compressed-tensors).
    """
    if entry in ALL:
        return lambda name: True
    is_expression = entry.startswith("re:")
    if not is_expression and "*" not in entry:
        parts = f".{text_name(entry)}."
        return lambda name: parts in f".{name}."
    try:
        return re.compile(entry[3:] if is_expression else translate(entry)).match
    except re.error as error:
        raise ConfigError(
            f"quantization_config: {entry!r} is no regular expression: {error}"
        ) from None
