"""The layers to run before a capture, so that all kernels of the capture are loaded.

Most layers of a model launch the same kernels with the same specialisation: they are of the same
kind. If the first layers contain every kind, their run loads the kernels of all layers. In a model
whose layers are equal, two layers are enough.
"""

from collections.abc import Hashable, Iterator
from enum import Enum

from torch import Tensor, nn

from minisgl.engine.model_runner import ModelRunner
from minisgl.models.decoder import DecoderLayer

_ALIGNMENT = 16  # kernels are specialised for addresses that are multiples of this
_PACKAGES = ("minisgl", "torch")
# The attributes that nn.Module itself sets. None of them selects a kernel of minisgl.
_BASE_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))


def layers_to_rehearse(runner: ModelRunner) -> int:
    """Return how many of the first layers launch all kernels of the model.

    The kernels of a layer also depend on the layer before it, which may leave a sum to this layer.
    The first layers therefore contain each pair of kinds of neighbouring layers.

    With tensor parallelism, the number is that of all layers. Each rank computes the number for
    itself, and ranks with different numbers would make different collective calls. The number is
    also that of all layers if a module of another package computes a part of a layer.
    """
    model, layers = runner.model, list(runner.model.model.layers)
    packages = {type(module).__module__.partition(".")[0] for module in model.modules()}
    if model.lm_head.comm.tp.size > 1 or not packages.issubset(_PACKAGES):
        return len(layers)
    kinds = [tuple(_kind(layer, runner)) for layer in layers]
    pairs = list(zip([None, *kinds], kinds, strict=False))
    return 1 + max(pairs.index(pair) for pair in pairs)


def _kind(layer: DecoderLayer, runner: ModelRunner) -> Iterator[Hashable]:
    """Yield the properties of a layer that select its kernels and their specialisation.

    These are the kind of the mixer, the MLP, the types and own settings of the modules, and the
    shapes, dtypes, strides and alignments of parameters, keys, values and scales.
    """
    yield from (layer.mixer.kind, layer.spec.mlp)
    for path, module in layer.named_modules():
        yield path, type(module)
        settings = vars(module)
        for setting in sorted(settings.keys() - _BASE_MODULE_ATTRIBUTES):
            value = settings[setting]
            if isinstance(value, bool | int | float | Enum):
                yield setting, value
            elif setting == "form":  # the format of quantised weights
                yield setting, str(value)
            elif value is None or isinstance(value, Tensor):
                yield setting, value is None
    for name, parameter in layer.named_parameters():
        yield name, *_form(parameter)
    for tensor in layer.mixer.state(runner.pools):
        yield None if tensor is None else tuple(_form(tensor))


def _form(tensor: Tensor) -> Iterator[Hashable]:
    yield from (tensor.shape, tensor.dtype, tensor.stride())
    yield tensor.data_ptr() % _ALIGNMENT
