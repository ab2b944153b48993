"""Launches of known kernels, with a stand-in for Triton."""

from typing import Any

from minisgl.kernel.triton.launch import CompiledKernel, Constants, launch


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
    jit, known = Jit(), dict[Any, CompiledKernel]()
    for key, programs, argument in (("x", 5, "p"), ("x", 7, "q"), ("y", 7, "r"), ("x", 2, "s")):
        launch(known, key, jit, programs, (argument, 1.5), constants)
    named = {"B": 16, "A": False, "num_warps": 2}
    assert jit.launched == [
        ("found", (5, 1, 1), ("p", 1.5), named),
        ("known", (7, 1, 1), ("q", 1.5, 16, False)),
        ("found", (7, 1, 1), ("r", 1.5), named),
        ("known", (2, 1, 1), ("s", 1.5, 16, False)),
    ]


def test_triton_looks_up_a_kernel_that_its_interpreter_did_not_compile() -> None:
    jit, known = Jit(compiles=False), dict[Any, CompiledKernel]()
    for _ in range(2):
        launch(known, "x", jit, 1, (), constants)
    assert [how for how, *_ in jit.launched] == ["found", "found"]
    assert not known
