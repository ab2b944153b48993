"""Launches Triton kernels without Triton's own look-up of the compiled kernel.

At each launch Triton inspects the type, the alignment and the divisibility of every argument to
find the compiled kernel. This takes the host 25 to 60 us. A start of a 0.6B model launches kernels
6,000 times to capture its graphs, and a step of an 8B model with prompts that no graph holds makes
36 launches of one kernel. Here the caller names the properties that can differ between its calls.
They are the key of the compiled kernel in a dictionary.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

_ALIGNMENT = 16  # kernels are specialised for addresses that are multiples of this


class Constants(NamedTuple):
    """The compile-time parameters of a kernel.

    values   the constexpr parameters, in the kernel's order.
    options  num_warps and the like.
    """

    values: Mapping[str, object]
    options: Mapping[str, object]


class _CompiledKernel(NamedTuple):
    """A kernel that Triton has compiled, and the constexpr values that each launch still passes."""

    compiled: Any
    constants: tuple[object, ...]


class Launcher:
    """A Triton kernel, and its compiled variants by the properties that they depend on.

    The parameters of the kernel are tensors, sizes, numbers and constants, in this order.
    """

    def __init__(self, kernel: Any, device: Callable[[], Hashable]) -> None:
        """kernel: a function under triton.jit. device: names the device that a launch runs on."""
        self._kernel, self._device = kernel, device
        self._known: dict[Hashable, _CompiledKernel] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        sizes: tuple[int, ...],
        numbers: tuple[object, ...],
        variant: tuple[Hashable, ...],
        constants: Callable[[], Constants],
    ) -> None:
        """Run kernel[grid](*tensors, *sizes, *numbers, **values, **options) on the current stream.

        tensors    the compiled kernel depends on their dtypes and on the alignment of their
                   addresses.
        sizes      integers. The compiled kernel depends on which are 1 or multiples of 16; here it
                   is found by their values, so there should be few different ones.
        numbers    arguments that no compiled kernel depends on: floats, integers of 32 bits for
                   which the kernel is not specialised (do_not_specialize), and TMA descriptors,
                   which depend on the constants.
        variant    all other properties that the constants depend on.
        constants  makes the constants; called if no compiled kernel is known.
        """
        forms = [
            None if tensor is None else (tensor.dtype, tensor.data_ptr() % _ALIGNMENT == 0)
            for tensor in tensors
        ]
        key = (self._device(), sizes, variant, *forms)
        found = self._known.get(key)
        if found is not None:
            grid = (*grid, 1, 1)[:3]
            found.compiled[grid](*tensors, *sizes, *numbers, *found.constants)
            return
        values, options = constants()
        compiled = self._kernel[grid](*tensors, *sizes, *numbers, **values, **options)
        if compiled is not None:  # Triton's interpreter returns None
            self._known[key] = _CompiledKernel(compiled, tuple(values.values()))
