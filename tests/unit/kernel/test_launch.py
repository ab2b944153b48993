"""Launches of known kernels, with a stand-in for Triton."""

from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl.kernel.triton.launch import Constants, Launcher


class Jit:
    """A Triton function that records its launches and those of the kernels it has compiled."""

    def __init__(self, compiles: bool = True) -> None:
        self.compiles = compiles
        self.launched: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: object, **named: object) -> object:
            self.launched.append(("found", grid, arguments, named))
            return Compiled(self.launched) if self.compiles else None

        return run


class Compiled:
    """A compiled kernel that records its launches."""

    def __init__(self, launched: list[tuple[Any, ...]]) -> None:
        self.launched = launched

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments: self.launched.append(("known", grid, arguments))


def constants() -> Constants:
    return Constants({"B": 16, "A": False}, {"num_warps": 2})


def test_a_known_kernel_gets_arguments_and_then_constants() -> None:
    jit = Jit()
    launch = Launcher(jit, lambda: 0)
    x, y = torch.zeros(2), torch.zeros(2)
    launch((5,), (x, None), (64,), (1.5, 3), ("v",), constants)
    launch((7, 2), (y, None), (64,), (2.5, 4), ("v",), constants)
    assert jit.launched == [
        ("found", (5,), (x, None, 64, 1.5, 3), {"B": 16, "A": False, "num_warps": 2}),
        ("known", (7, 2, 1), (y, None, 64, 2.5, 4, 16, False)),
    ]


TENSOR = torch.zeros(8, dtype=torch.int16)
SIZES, VARIANT = (64, 3), ("v", None)


@pytest.mark.parametrize(
    ("tensors", "sizes", "variant"),
    [
        ((TENSOR, TENSOR), SIZES, VARIANT),
        ((TENSOR.int(), None), SIZES, VARIANT),
        ((TENSOR[1:], None), SIZES, VARIANT),  # the address is no multiple of 16
        ((TENSOR, None), (64, 1), VARIANT),
        ((TENSOR, None), SIZES, ("v", 5)),
    ],
)
def test_another_property_of_a_launch_needs_another_kernel(
    tensors: tuple[Tensor | None, ...], sizes: tuple[int, ...], variant: tuple[Any, ...]
) -> None:
    jit = Jit()
    launch = Launcher(jit, lambda: 0)
    for _ in range(2):
        launch((1,), (TENSOR, None), SIZES, (), VARIANT, constants)
        launch((1,), tensors, sizes, (), variant, constants)
    assert [how for how, *_ in jit.launched] == ["found", "found", "known", "known"]


def test_each_device_has_kernels_of_its_own() -> None:
    jit = Jit()
    devices = iter((0, 1, 0, 1))
    launch = Launcher(jit, lambda: next(devices))
    for _ in range(4):
        launch((1,), (), (), (), (), constants)
    assert [how for how, *_ in jit.launched] == ["found", "found", "known", "known"]


def test_triton_looks_up_a_kernel_that_its_interpreter_did_not_compile() -> None:
    jit = Jit(compiles=False)
    launch = Launcher(jit, lambda: None)
    for _ in range(2):
        launch((1,), (), (), (), (), constants)
    assert [how for how, *_ in jit.launched] == ["found", "found"]
