"""Launches a Triton kernel without Triton's own look-up, for steps that no CUDA graph holds.

At each launch Triton inspects the type, the alignment and the divisibility of every argument to
find the compiled kernel. This takes the host 25 us, 36 times in a step of an 8B model with prompts.
Here the caller names the properties that can differ between its calls. They are the key of the
compiled kernel in a dictionary.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple


class Constants(NamedTuple):
    """The compile-time parameters of a kernel.

    values   the constexpr parameters, which follow the other arguments.
    options  num_warps and the like.
    """

    values: Mapping[str, object]
    options: Mapping[str, object]


class CompiledKernel(NamedTuple):
    """A kernel that Triton has compiled, and the constexpr values that each launch still passes."""

    compiled: Any
    constants: tuple[object, ...]


def launch(
    known: dict[Hashable, CompiledKernel],
    key: Hashable,
    kernel: Any,
    programs: int,
    arguments: tuple[object, ...],
    constants: Callable[[], Constants],
) -> None:
    """Run kernel[(programs,)](*arguments, **values, **options) on the current stream.

    known      compiled kernels by `key`; a missing one is compiled and added.
    key        all that the compiled kernel depends on: the constants, the types of the arguments,
               and which addresses and integers are multiples of 16 or equal to 1.
    arguments  all arguments of the kernel but the constants, in the kernel's order.
    constants  makes the constants; called when the kernel is not known.
    """
    grid = (programs, 1, 1)
    found = known.get(key)
    if found is not None:
        found.compiled[grid](*arguments, *found.constants)
        return
    values, options = constants()
    compiled = kernel[grid](*arguments, **values, **options)
    if compiled is not None:  # Triton's interpreter returns None
        known[key] = CompiledKernel(compiled, tuple(values.values()))
