"""FlashInfer's rule of gated delta nets for the tokens of chunks up to their targets.

FlashInfer computes neighbouring ranges of tokens, each from an initial state, and returns the state
after each. A chunk has two ranges, up to its target and after it. run_tokens overwrites the outputs
of the second. FlashInfer 0.6 waits forever for an empty range. `_order` therefore puts the ranges
with tokens first, and gives each other range one token after those of the step.

FlashInfer's states have the channels of the values first.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.delta import DeltaMemory, Inputs
from minisgl.kernel.delta_rule import compiled_rule
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.history import fold
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, is_hopper

_BLOCK = 32  # channels of the values of a program
_CHANNELS = 128  # of the heads for which FlashInfer has kernels
# FlashInfer has a program for each range and head. Fewer take as long as 32, and longer than ours.
_LEAST_PROGRAMS = 32


@triton.jit(
    do_not_specialize=["num_chunks", "num_tokens"],
    do_not_specialize_on_alignment=["start", "lengths", "first", "target"],
)
def _order(
    start, lengths, first, target, ends, places, num_chunks, num_tokens, RANGES: tl.constexpr
):
    """Write the beginnings of all ranges and the end of the last, and the place of each first one.

    The ranges of chunk i are 2 i and 2 i + 1.
    """
    index = tl.arange(0, RANGES)
    exists = index < 2 * num_chunks
    chunk = index // 2
    is_first = index % 2 == 0
    begin = tl.load(first + chunk, mask=exists, other=0)
    count = tl.load(target + chunk, mask=exists, other=0)
    count = tl.maximum(count - tl.load(start + chunk, mask=exists, other=0), 0)
    length = tl.load(lengths + chunk, mask=exists, other=0)
    filled = exists & (tl.where(is_first, count, length - count) > 0)
    empty = exists & (~filled)
    before = tl.cumsum(empty.to(tl.int32), 0) - 1  # empty ranges before an empty one
    place = tl.where(
        filled, tl.cumsum(filled.to(tl.int32), 0) - 1, tl.sum(filled.to(tl.int32), 0) + before
    )
    begin = tl.where(filled, begin + tl.where(is_first, 0, count), num_tokens + before)
    tl.store(ends + place, begin.to(tl.int64), mask=exists)
    tl.store(ends + 2 * num_chunks, (num_tokens + tl.sum(empty.to(tl.int32), 0)).to(tl.int64))
    tl.store(places + chunk, place, mask=exists & is_first)


@triton.jit(do_not_specialize_on_alignment=["rows", "start", "base", "target"])
def _begin(
    state, keys, deltas, decays, initial, rows, start, base, target, places,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the state before the first token of a chunk: that of the boundary, and the history."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    starts, stands = tl.load(start + request), tl.load(base + request)
    if tl.load(target + request) <= starts:
        return
    row = tl.load(rows + request).to(tl.int64)
    column, values = tl.arange(0, DK), block * BLOCK + tl.arange(0, BLOCK)
    at = state + row * STATE_STRIDE + head * (DK * DV) + column[:, None] * DV + values[None, :]
    s = tl.load(at, mask=(stands > 0) & (column[:, None] < DK), other=0.0)
    if stands < starts:
        key_head = head // (HEADS // KEY_HEADS)
        s = fold(
            s,
            keys + row * (2 * SPAN * KEY_HEADS * DK) + key_head * DK,
            deltas + row * (DELTA_RING * HEADS * DV) + head * DV + block * BLOCK,
            decays + row * (2 * SPAN * HEADS) + head,
            stands, starts, HEADS, KEY_HEADS * DK, HEADS * DV, DELTA_RING, SPAN, DK, BLOCK,
        )  # fmt: skip
    place = tl.load(places + request).to(tl.int64)
    to = initial + ((place * HEADS + head) * DV + values[None, :]) * DK + column[:, None]
    tl.store(to, s)


@triton.jit(do_not_specialize_on_alignment=["rows", "start", "target"])
def _end(
    final, state, rows, start, target, places, HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr, STATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the state after the first range of a chunk to its row."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if tl.load(target + request) <= tl.load(start + request):
        return
    row = tl.load(rows + request).to(tl.int64)
    place = tl.load(places + request).to(tl.int64)
    column, values = tl.arange(0, DK), block * BLOCK + tl.arange(0, BLOCK)
    at = final + ((place * HEADS + head) * DV + values[None, :]) * DK + column[:, None]
    to = state + row * STATE_STRIDE + head * (DK * DV) + column[:, None] * DV + values[None, :]
    tl.store(to, tl.load(at))


_order_launcher = Launcher(_order, current_device)
_begin_launcher = Launcher(_begin, current_device)
_end_launcher = Launcher(_end, current_device)


def takes_ranges(mixed: Tensor, memory: DeltaMemory, step: StateStep) -> bool:
    """Whether the step has the sizes for run_ranges and is faster with it, on this GPU.

    A graph pads its requests, and a padding request would be two ranges for each head.
    """
    key_heads, (heads, *channels) = memory.keys.shape[2], memory.state.shape[1:]
    return (
        not step.padded
        and heads * step.chunks >= _LEAST_PROGRAMS
        and heads > key_heads
        and channels == [_CHANNELS, _CHANNELS]
        and mixed.dtype == torch.bfloat16
        and memory.state.dtype == torch.float32
        and not mixed.is_meta
        and is_hopper()
        and compiled_rule() is not None
    )


def run_ranges(inputs: Inputs, memory: DeltaMemory, step: StateStep, out: Tensor) -> None:
    """Run the rule as delta_chunk.run_rule does. Replaces inputs.g by e^g.

    The step is one for which takes_ranges returns True. inputs and out have step.chunks more tokens
    than the step, after its own; those of inputs are zeros, and the outputs are not used. The first
    call of a process loads FlashInfer's kernels.
    """
    rule = compiled_rule()
    assert rule is not None, "the rule of FlashInfer is not compiled; this is a bug"
    q, k, v, g, beta = inputs
    key_heads, (heads, dk, dv) = memory.keys.shape[2], memory.state.shape[1:]
    chunks, tokens = step.chunks, len(q) - step.chunks
    rows, start, lengths, first, base, target = (column[-chunks:] for column in step[:6])
    ends, places = first.new_empty(2 * chunks + 1, dtype=torch.int64), first.new_empty(chunks)
    ranges = max(triton.next_power_of_2(2 * chunks), 16)
    _order_launcher(
        (1,),
        (start, lengths, first, target, ends, places),
        (),
        (chunks, tokens),
        (ranges,),
        lambda: Constants({"RANGES": ranges}, {"num_warps": 1}),
    )
    initial, final = (g.new_empty(2 * chunks, heads, dv, dk) for _ in range(2))
    sizes = {"HEADS": heads, "DK": dk, "DV": dv, "STATE_STRIDE": memory.state.stride(0)}
    history = {"SPAN": memory.page_size, "DELTA_RING": memory.deltas.shape[1]}
    block = min(_BLOCK, dv)
    grid = (dv // block, heads, chunks)
    _begin_launcher(
        grid,
        (
            *(memory.state, memory.keys, memory.deltas, memory.decays, initial),
            *(rows, start, base, target, places),
        ),
        (),
        (),
        (key_heads, *sizes.values(), *history.values()),
        lambda: Constants(
            {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv}
            | history
            | {"STATE_STRIDE": sizes["STATE_STRIDE"], "BLOCK": block},
            {"num_warps": 4},
        ),
    )
    rule(
        *(q, k, v, g.exp_(), beta, 1.0, initial),
        output_final_state=True,
        cu_seqlens=ends,
        output=out,
        output_state=final,
    )
    _end_launcher(
        grid,
        (final, memory.state, rows, start, target, places),
        (),
        (),
        (*sizes.values(),),
        lambda: Constants({**sizes, "BLOCK": block}, {"num_warps": 4}),
    )
