"""The Triton kernels of one layer's step, with the contracts of minisgl.kernel.delta.

run_tokens (delta_step.py) runs the decode requests, run_rule (delta_chunk.py) or run_ranges
(delta_ranges.py) the tokens of chunks up to their targets, and run_tokens again the last tokens of
the chunks. All overwrite the rows of their tokens in `out` [T, Hv, Dv]. In a step without chunks
run_tokens also applies the norm and the gate.
"""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.delta import DeltaMemory, DeltaWeights, GatedNorm
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.delta_chunk import prepare, run_rule
from minisgl.kernel.triton.delta_ranges import run_ranges, takes_ranges
from minisgl.kernel.triton.delta_step import run_tokens
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_HEADS = 8  # heads of a program of _gated_norm


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaMemory,
    step: StateStep,
    norm: GatedNorm,
) -> Tensor:
    """See the reference. The channels of all inputs are contiguous. A page has 16 to 64 tokens."""
    common, sizes = (mixed, a, b, weights, memory, step), memory.deltas.shape[2:]
    if not step.chunks:
        out = mixed.new_empty((len(mixed), *sizes))
        run_tokens(*common, out, norm)
        return out.flatten(1)
    spare = step.chunks if takes_ranges(mixed, memory, step) else 0
    rule = run_ranges if spare else run_rule
    out = mixed.new_empty((len(mixed) + spare, *sizes))
    rule(prepare(*common, spare), memory, step, out)
    out = out[: len(mixed)]
    run_tokens(*common, out, None)
    return gated_norm(out, *norm)


@triton.jit(do_not_specialize=["num_heads", "gate_stride"])
def _gated_norm(
    x, weight, gate, out, num_heads, gate_stride, eps,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """num_heads: of all tokens together; HEADS: of a token; BLOCK: of a program."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    head = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (head < num_heads)[:, None]
    token = (head // HEADS).to(tl.int64)
    column = tl.arange(0, D)
    at = head.to(tl.int64)[:, None] * D + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = token[:, None] * gate_stride + (head % HEADS)[:, None] * D + column[None, :]
    opens = tl.load(gate + gate_at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    value *= tl.load(weight + column).to(tl.float32)[None, :]
    value *= opens / (1.0 + tl.exp(-opens))
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


_norm_launcher = Launcher(_gated_norm, current_device)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """See the reference. x is contiguous; channels of gate are contiguous."""
    tokens, heads, dim = x.shape
    out = x.new_empty((tokens, heads * dim))
    _norm_launcher(
        (triton.cdiv(tokens * heads, _HEADS),),
        (x, weight, gate, out),
        (),
        (tokens * heads, gate.stride(0), eps),
        (heads, dim),
        lambda: Constants(
            {"HEADS": heads, "D": dim, "BLOCK": _HEADS, "OVERLAP": overlaps()},
            {"launch_pdl": overlaps()},
        ),
    )
    return out
