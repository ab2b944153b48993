"""Launches Triton kernels without Triton's own look-up of the compiled kernel.

At each launch Triton inspects the type, the alignment and the divisibility of every argument to
find the compiled kernel. This takes the host 25 us or more. A start launches kernels some thousand
times to capture its graphs, and an 8B model launches decode attention 36 times in each step that is
no graph. `Launcher` looks up the compiled kernel in a dictionary. The key holds the device, the
dtypes and alignments of the tensors, the sizes, and the properties that the caller names.
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


def fill_absent(stand_in: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return the tensors, with `stand_in` in place of each None.

    A kernel whose constants say that a tensor is absent does not access it. But for None, Triton
    would compile another kernel.
    """
    return tuple(stand_in if tensor is None else tensor for tensor in tensors)


class _CompiledKernel(NamedTuple):
    """A kernel that Triton has compiled, and the constexpr values that each launch still passes."""

    compiled: Any
    constants: tuple[object, ...]


class Launcher:
    """A Triton kernel, and its compiled kernels by the key of their launches.

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

        tensors    Triton specialises the kernel for their dtypes and for addresses that are
                   multiples of 16.
        sizes      integers. Triton specialises the kernel for 1 and for multiples of 16. The key
                   holds the integers themselves, so there should be few different ones.
        numbers    arguments that are not in the key: floats, integers of 32 bits for which the
                   kernel is not specialised (do_not_specialize), and arguments whose type the
                   variant determines: TMA descriptors, and None.
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
