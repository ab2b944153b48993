"""Trials of a start: the memory of steps and CUDA graphs on a GPU, before the KV pools exist.

A server has one block for steps and another for graphs (segments.py).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from minisgl.engine import memory
from minisgl.engine.graphs import DecodeShape
from minisgl.engine.segments import block_for, reserve_block
from minisgl.engine.step import StepLauncher


class Taken(NamedTuple):
    """The memory of a GPU that is not for KV pages, in bytes.

    weights  the memory that the driver gave for the load of the model.
    steps    recurrent states, tables, workspaces and the largest step.
    graphs   the estimate for all CUDA graphs.
    copies   the buffers of a host cache.
    """

    weights: int
    steps: int
    graphs: int
    copies: int

    def remedy(self, max_chunk_tokens: int) -> str:
        """Return the parts and the flags that change them, for the end of a message."""
        return (
            f": weights take {self.weights}, steps of up to {max_chunk_tokens} prompt tokens "
            f"{self.steps}, graphs {self.graphs}, and copies of a host cache {self.copies}; lower "
            "--max-prefill-length for smaller steps and graphs, raise memory_ratio"
        )


def step_in_block(
    assemble: Callable[[], StepLauncher],
    run_largest: Callable[[StepLauncher], None],
    device: torch.device,
) -> tuple[StepLauncher, int]:
    """Run the largest step twice: without a block, to find the size of a block, and then in it.

    assemble: allocates the device memory of an engine, except for graphs. Returns the second
    launcher, with the tensors that an engine keeps after its first step, and the bytes of the
    block. torch then keeps the memory of the second step only. Raises torch.OutOfMemoryError.
    """
    launcher = assemble()
    block = block_for(partial(run_largest, launcher), device)
    del launcher
    torch.cuda.empty_cache()
    launcher = assemble()
    reserve_block(block, device)
    run_largest(launcher)
    return launcher, block


def graph_bytes(
    capture: Callable[[Sequence[DecodeShape], Sequence[int]], tuple[object, Sequence[int]]],
    shapes: Sequence[DecodeShape],
    token_sizes: Sequence[int],
    device: torch.device,
) -> int:
    """Return the memory that all graphs will take, in bytes, from trial captures.

    The trial captures the two largest graphs of each kind. The result is the memory of the trial,
    plus memory.further_graph_bytes. capture: returns the graphs, and the free memory before the
    captures and after each of them. It leaves no memory of its rehearsals to torch.
    """
    torch.cuda.empty_cache()
    graphs, free = capture(shapes[-2:], token_sizes[-2:])
    taken = free[0] - memory.free_bytes(device)
    del graphs
    torch.cuda.empty_cache()
    return taken + memory.further_graph_bytes(free, shapes, token_sizes) if taken else 0
