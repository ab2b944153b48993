"""Launches of a kernel that is known already, for those that no graph can hold.

For each launch Triton asks every argument for its type, its alignment and what divides it, and so
finds the kernel among those it has compiled: 25 us of the host, 36 times in a step of 8B with
prompts. A caller that knows what of its arguments can differ keeps the kernel by that instead.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple


class Constants(NamedTuple):
    """What a kernel is compiled with: its constexprs, behind the arguments; and options."""

    values: Mapping[str, object]
    options: Mapping[str, object]


class Known(NamedTuple):
    """A kernel as Triton has compiled it, and the constexprs that are handed to it still."""

    compiled: Any
    constants: tuple[object, ...]


def launch(
    known: dict[Hashable, Known],
    key: Hashable,
    kernel: Any,
    programs: int,
    arguments: tuple[object, ...],
    constants: Callable[[], Constants],
) -> None:
    """kernel[(programs,)](*arguments, **values, **options), on the current stream.

    known: kernels by `key`, which holds all that they depend on: constants, types of the arguments,
    whether addresses and integers are multiples of 16, or 1. arguments: all that the kernel takes
    but constants, in its order.
    """
    grid = (programs, 1, 1)
    found = known.get(key)
    if found is not None:
        found.compiled[grid](*arguments, *found.constants)
        return
    values, options = constants()
    compiled = kernel[grid](*arguments, **values, **options)
    if compiled is not None:  # the interpreter compiles nothing
        known[key] = Known(compiled, tuple(values.values()))
