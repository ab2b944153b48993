"""The format of a model's weights: how its linears and its experts store and multiply them."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minisgl.layers.linear import LinearMethodFactory, UnquantizedLinear
from minisgl.moe.experts import ExpertsFactory, UnquantizedExperts
from minisgl.moe.stacked_experts import UnquantizedStackedExperts


class StoredWeights(NamedTuple):
    """The quantised weights of a model in memory, for the time that a step needs at least.

    name     of the format, such as fp8 or int4. none: no weight is quantised.
    bits     of a weight, with its share of the scales that are stored beside the weights.
    linears  the linears and the routed experts are quantised. False: the routed experts only.
    """

    name: str = "none"
    bits: float = 16
    linears: bool = True


class Quantization(NamedTuple):
    """The methods of one format.

    linear   creates the method of each linear layer.
    experts  creates the method of each layer's experts. None: the format has none, and a model
             with experts is refused.
    stacked_experts
             as experts, for the stacked experts of gpt-oss.
    draft_logits
             creates the method of a second copy of the language-model head, from its unquantised
             weight. Only drafts read it, so its rounding changes no output. None: drafts read the
             head itself.
    stored   the weights in memory. Of several formats it is the one with the fewest bits.
    unused   endings of the names of tensors that a checkpoint of this format may have and that the
             model does not read, such as scales of activations.
    """

    linear: LinearMethodFactory
    experts: ExpertsFactory | None = None
    unused: tuple[str, ...] = ()
    stacked_experts: ExpertsFactory | None = None
    draft_logits: LinearMethodFactory | None = None
    stored: StoredWeights = StoredWeights()


UNQUANTIZED = Quantization(
    UnquantizedLinear, UnquantizedExperts, stacked_experts=UnquantizedStackedExperts
)

# Creates the methods of a format from the object quantization_config in a checkpoint's config.json.
# Raises ConfigError for settings that the format does not support.
QuantizationFactory = Callable[[Mapping[str, Any]], Quantization]
