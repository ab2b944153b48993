"""The Triton kernels of one Mamba-2 layer's step, with the contracts of minisgl.kernel.ssd.

run_tokens (ssd_step.py) runs the decode requests, run_chunks (ssd_chunk.py) the tokens of chunks up
to their targets, and run_tokens again the last tokens of the chunks. Both take the arguments of
`selective_scan`, and overwrite the rows of their tokens in `out` [T, Hv, Dv].
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.delta import DeltaMemory
from minisgl.kernel.ssd import SsdWeights
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps
from minisgl.kernel.triton.ssd_chunk import run_chunks
from minisgl.kernel.triton.ssd_step import run_tokens


def selective_scan(
    mixed: Tensor, dt: Tensor, weights: SsdWeights, memory: DeltaMemory, step: StateStep
) -> Tensor:
    """See the reference. The channels of all inputs are contiguous. A page has 16 to 64 tokens."""
    out = mixed.new_empty((len(mixed), *memory.deltas.shape[2:]))
    if step.chunks:
        run_chunks(mixed, dt, weights, memory, step, out)
    run_tokens(mixed, dt, weights, memory, step, out)
    return out


@triton.jit(do_not_specialize=["gate_stride"])
def _norm(
    x, weight, gate, out, gate_stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One group of one token. SIZE: its elements; BLOCK: the next power of two."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    group, token, groups = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(0)
    element = tl.arange(0, BLOCK)
    inside, column = element < SIZE, group * SIZE + element
    at = token * groups * SIZE + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    opens = tl.load(gate + token * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value *= opens / (1.0 + tl.exp(-opens))
    value *= tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, (value * factor).to(out.dtype.element_ty), mask=inside)


_norm_launcher = Launcher(_norm, current_device)


def gated_group_norm(x: Tensor, weight: Tensor, gate: Tensor, groups: int, eps: float) -> Tensor:
    """See the reference. x is contiguous; elements of gate are contiguous."""
    tokens, width = x.shape
    size, out = width // groups, torch.empty_like(x)
    block = triton.next_power_of_2(size)
    _norm_launcher(
        (groups, tokens),
        (x, weight, gate, out),
        (),
        (gate.stride(0), eps),
        (size,),
        lambda: Constants(
            {"SIZE": size, "BLOCK": block, "OVERLAP": overlaps()},
            {"num_warps": 8 if block >= 4096 else 4, "launch_pdl": overlaps()},
        ),
    )
    return out
