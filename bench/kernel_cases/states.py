"""The inputs of kernels with recurrent states: their memory, and a step."""

from typing import Any, Final

import torch
from torch import Tensor

from minisgl.distributed.comm import ONE_RANK
from minisgl.kernel.delta import DeltaMemory
from minisgl.kernel.states import StateStep
from minisgl.layers.states import StateBuild

PAGE: Final = 16  # tokens
_DEVICE: Final = torch.device("cuda")


def filled_memory(spec: Any, rows: int) -> DeltaMemory:
    """Return random states of these rows in bfloat16. spec: a DeltaSpec or a MambaSpec."""
    build = StateBuild(rows, PAGE, False, ONE_RANK, torch.bfloat16, _DEVICE)
    kept = [torch.randn(rows, *p.shape, device=_DEVICE, dtype=p.dtype) for p in spec.kept(build)]
    memory: DeltaMemory = spec.memory(kept, build)
    for ring in (memory.keys, memory.deltas, memory.inputs):
        ring.normal_()
    memory.decays.fill_(-0.1)
    return memory


def step_of(start: Tensor, lengths: Tensor) -> StateStep:
    """Return the step in which request i of row i forwards lengths[i] tokens after start[i]."""
    page, last = start // PAGE * PAGE, (start + lengths - 1) // PAGE * PAGE
    entered = (start % PAGE == 0) & (start > 0)
    first = lengths.cumsum(0) - lengths
    columns = (torch.arange(len(start)), start, lengths, first, page - PAGE * entered, last)
    on_device = torch.stack([column.int() for column in columns]).to(_DEVICE)
    return StateStep.of(on_device, chunks=int(lengths.max() > 1))


def normal(*shape: int) -> Tensor:
    """Return random numbers in bfloat16."""
    return torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)
