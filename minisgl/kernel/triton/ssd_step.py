"""Mamba-2, a few tokens of each request: decode steps, and the last tokens of a chunk.

`_inputs` convolves the tokens of a request, some channels in a program. `_apply` has some channels
of the values of one head. It reads this part of the state once, in a step without chunks before
`_inputs` is complete, and compares the history with the queries. It writes the state only if the
row has entered a new page.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.delta import TAPS, DeltaMemory
from minisgl.kernel.ssd import SsdWeights
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.history import convolve, fold, keep_tails
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_CHANNELS = 256  # channels of a program of _inputs, at most
# Channels of the values of a program of _apply, at most, and its warps; then those of a step with
# one token a request: the fastest of 8 choices for 64 requests of Granite 4 H-Micro, on one H200,
# 2026-11-28.
_BLOCK, _WARPS = 64, 4
_ONE_BLOCK, _ONE_WARPS = 32, 2


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit(
    do_not_specialize=["mixed_stride"],
    do_not_specialize_on_alignment=["rows", "start", "lengths", "first", "base", "target"],
)
def _inputs(
    mixed, conv, bias, inputs, tails, x_out, rows, start, lengths, first, base, target,
    mixed_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr,
    TAIL_STRIDE: tl.constexpr, TAPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write x_out, float32 [T, WIDTH]. The tokens of a chunk before `target` are kept as inputs."""
    channels, request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    begin, length = tl.load(start + request), tl.load(lengths + request)
    if length == 0:
        return
    row = tl.load(rows + request).to(tl.int64)
    boundary, stands = tl.load(target + request), tl.load(base + request)
    token_zero = tl.load(first + request).to(tl.int64)
    inputs += row * (RING * WIDTH)
    tails += row * TAIL_STRIDE
    mixed += token_zero * mixed_stride
    skip = tl.maximum(boundary - begin, 0)
    added = tl.load(bias + channels).to(tl.float32)
    if stands < boundary:
        keep_tails(mixed, inputs, tails, boundary, begin, channels, mixed_stride, WIDTH, RING, TAPS)
        tl.debug_barrier()  # the inputs are read before a new token takes the place of one
    for token in range(tl.minimum(skip, tl.maximum(length - RING, 0)), length):
        x, new = convolve(
            mixed, inputs, tails, conv, added, begin + token, stands, channels, token,
            mixed_stride, WIDTH, RING, TAPS,
        )  # fmt: skip
        tl.store(inputs + (begin + token) % RING * WIDTH + channels, new)
        tl.store(x_out + (token_zero + token) * WIDTH + channels, x)


@triton.jit(
    do_not_specialize=["dt_stride"],
    do_not_specialize_on_alignment=["rows", "start", "lengths", "first", "base", "target"],
)
def _apply(
    x, dt, a_log, dt_bias, skips, state, keys, deltas, decays, out,
    rows, start, lengths, first, base, target, dt_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, ONE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """CHUNKS: whether kernels of chunks have moved states in this step.

    ONE: whether each request has one token at most. The kernel then keeps no history across tokens,
    and the compiler gives it two thirds of the registers.
    """
    WIDTH: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    OF_KEY: tl.constexpr = HEADS // KEY_HEADS
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        if CHUNKS:
            gdc_wait()
    key_head = head // OF_KEY
    row = tl.load(rows + request).to(tl.int64)
    begin, length = tl.load(start + request), tl.load(lengths + request)
    if length == 0:
        if OVERLAP and not CHUNKS:
            gdc_wait()
        return
    boundary, stands = tl.load(target + request), tl.load(base + request)
    token_zero = tl.load(first + request).to(tl.int64)
    skip = tl.maximum(boundary - begin, 0)
    if skip > 0:
        stands = boundary  # the kernels of chunks have moved the state
    column, values = tl.arange(0, DK), block * BLOCK + tl.arange(0, BLOCK)
    rate, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    direct = tl.load(skips + head)
    keys += row * (2 * SPAN * KEY_HEADS * DK) + key_head * DK
    decays += row * (2 * SPAN * HEADS) + head
    deltas += row * (DELTA_RING * HEADS * DV) + head * DV + block * BLOCK
    at = state + row * STATE_STRIDE + head * (DK * DV) + column[:, None] * DV + values[None, :]
    s = tl.load(at, mask=(stands > 0) & (column[:, None] < DK), other=0.0)
    if OVERLAP and not CHUNKS:
        gdc_wait()
    if stands < boundary:
        s = fold(
            s, keys, deltas, decays, stands, boundary, HEADS, KEY_HEADS * DK, HEADS * DV,
            DELTA_RING, SPAN, DK, BLOCK,
        )  # fmt: skip
        tl.store(at, s)
        tl.debug_barrier()  # all deltas are read before a new token takes the place of one
    past = tl.arange(0, DELTA_RING)
    count = begin + skip - boundary  # tokens of the history
    known = past < count
    slot = (boundary + past) % (2 * SPAN)
    k_at = keys + slot[:, None] * (KEY_HEADS * DK) + column[None, :]
    k_past = tl.load(k_at, mask=known[:, None], other=0.0)
    g_past = tl.cumsum(tl.load(decays + slot * HEADS, mask=known, other=0.0), 0)
    total = tl.sum(tl.where(past == count - 1, g_past, 0.0), 0)
    d_at = deltas + ((boundary + past) % DELTA_RING)[:, None] * (HEADS * DV)
    d_past = tl.load(d_at + tl.arange(0, BLOCK)[None, :], mask=known[:, None], other=0.0)
    for token in range(skip, skip + 1 if ONE else length):
        index, position = token_zero + token, begin + token
        here = x + index * WIDTH
        q = tl.load(here + key_head * DK + column)
        k = tl.load(here + (KEY_HEADS + key_head) * DK + column).to(keys.dtype.element_ty)
        v = tl.load(here + 2 * KEY_HEADS * DK + head * DV + values)
        size = softplus(tl.load(dt + index * dt_stride + head).to(tl.float32) + bias)
        g, d = rate * size, size * v
        total += g
        new, earlier = past == position - boundary, past < position - boundary
        attends = tl.sum(k_past.to(tl.float32) * q[None, :], 1)
        attends *= tl.exp(tl.where(earlier, total - g_past, float("-inf")))
        o = tl.exp(total) * tl.sum(s * q[:, None], 0) + tl.sum(d_past * attends[:, None], 0)
        o += tl.sum(k.to(tl.float32) * q, 0) * d + direct * v
        tl.store(out + (index * HEADS + head) * DV + values, o.to(out.dtype.element_ty))
        tl.store(deltas + position % DELTA_RING * (HEADS * DV) + tl.arange(0, BLOCK), d)
        ring = position % (2 * SPAN)
        if block == 0:
            tl.store(decays + ring * HEADS, g)
            if head % OF_KEY == 0:
                tl.store(keys + ring * (KEY_HEADS * DK) + column, k)
        if not ONE:
            k_past = tl.where(new[:, None], k[None, :], k_past)
            g_past = tl.where(new, total, g_past)
            d_past = tl.where(new[:, None], d[None, :], d_past)


_inputs_launcher = Launcher(_inputs, current_device)
_apply_launcher = Launcher(_apply, current_device)


def channel_block(channels: int, most: int) -> int:
    """Return the largest power of two that divides `channels`, at most `most`."""
    return min(channels & -channels, most)


def run_tokens(
    mixed: Tensor,
    dt: Tensor,
    weights: SsdWeights,
    memory: DeltaMemory,
    step: StateStep,
    out: Tensor,
) -> None:
    """Run the decode requests, and after run_chunks the tokens of chunks from their targets on."""
    key_heads, (heads, dk, dv) = memory.keys.shape[2], memory.state.shape[1:]
    *requests, chunks, _ = step
    span, history, ring = memory.page_size, memory.deltas.shape[1], memory.inputs.shape[1]
    width, reqs = mixed.shape[1], len(step.rows)
    x = mixed.new_empty(len(mixed), width, dtype=torch.float32)
    tail_stride, state_stride = memory.tails.stride(0), memory.state.stride(0)
    block = channel_block(width, _CHANNELS)
    _inputs_launcher(
        (width // block, reqs),
        (mixed, weights.conv, weights.bias, memory.inputs, memory.tails, x, *requests),
        (),
        (mixed.stride(0),),
        (width, ring, tail_stride),
        lambda: Constants(
            {"WIDTH": width, "BLOCK": block, "RING": ring, "TAIL_STRIDE": tail_stride}
            | {"TAPS": TAPS, "OVERLAP": overlaps()},
            {"num_warps": 4, "launch_pdl": overlaps()},
        ),
    )
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv, "SPAN": span}
    one = chunks == 0 and history == span  # a step with drafts has a longer history
    most, warps = (_ONE_BLOCK, _ONE_WARPS) if one else (_BLOCK, _WARPS)
    values = channel_block(dv, most)
    state = memory.state, memory.keys, memory.deltas, memory.decays
    _apply_launcher(
        (dv // values, heads, reqs),
        (x, dt, weights.a_log, weights.dt_bias, weights.skip, *state, out, *requests),
        (),
        (dt.stride(0),),
        (*sizes.values(), history, state_stride, chunks > 0, one),
        lambda: Constants(
            sizes
            | {"DELTA_RING": history, "STATE_STRIDE": state_stride, "BLOCK": values}
            | {"CHUNKS": chunks > 0, "ONE": one, "OVERLAP": overlaps()},
            {"num_warps": warps, "launch_pdl": overlaps()},
        ),
    )
