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


class Trial(NamedTuple):
    """The memory that an engine takes beside weights and KV pages, measured on a GPU, in bytes.

    block   the segment for the tensors of a step.
    steps   all tensors of an engine but KV pages, and the block.
    graphs  the estimate for all CUDA graphs.
    """

    block: int
    steps: int
    graphs: int

    def remedy(self, weights: int, copies: int, max_chunk_tokens: int) -> str:
        """Return the parts and the flags that change them, for the end of a message.

        weights: bytes that the driver gave for the load of the model. copies: bytes of the buffers
        of a host cache.
        """
        return (
            f": weights take {weights}, steps of up to {max_chunk_tokens} prompt tokens "
            f"{self.steps}, graphs {self.graphs}, and copies of a host cache {copies}; lower "
            "--max-prefill-length for smaller steps and graphs, raise memory_ratio"
        )


def run_trial(
    assemble: Callable[[], StepLauncher],
    run_largest: Callable[[StepLauncher], None],
    capture: Callable[
        [StepLauncher, Sequence[DecodeShape], Sequence[int]], tuple[object, Sequence[int]]
    ],
    sizes: tuple[Sequence[DecodeShape], Sequence[int]],
    device: torch.device,
) -> Trial:
    """Measure the memory of steps and graphs. Leaves none of it to torch.

    A first run of the largest step finds the size of the block. The second one runs in the block,
    after the captures of the two largest graphs of each kind. A start has the same order. If the
    block came first, the buffers of the graphs would take its gaps, and the estimate would miss
    them.

    assemble: allocates the device memory of an engine, except for graphs. capture: returns the
    graphs, and the free memory before the captures and after each of them; it leaves no memory of
    its rehearsals to torch. sizes: of all graphs, the results of memory.graph_sizes. Raises
    torch.OutOfMemoryError.
    """
    shapes, token_sizes = sizes
    free_before = memory.free_bytes(device)
    launcher = assemble()
    block = block_for(partial(run_largest, launcher), device)
    del launcher
    torch.cuda.empty_cache()
    launcher = assemble()
    graphs, free = capture(launcher, shapes[-2:], token_sizes[-2:])
    captured = free[0] - memory.free_bytes(device)
    reserve_block(block, device)
    run_largest(launcher)
    steps = free_before - memory.free_bytes(device) - captured
    del graphs, launcher
    torch.cuda.empty_cache()
    further = memory.further_graph_bytes(free, shapes, token_sizes) if captured else 0
    return Trial(block, steps, captured + further)
