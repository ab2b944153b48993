"""Gated delta nets, a few tokens of each request: decode steps, and the last tokens of a chunk.

A program of `_inputs` convolves the tokens of a request, for one value head, or for one key head,
whose keys and queries it compares with the history. `_apply` has some channels of the values of one
head, or all of them if it also applies the norm and the gate. It reads this part of the state once,
in a step without chunks before `_inputs` is complete. It writes the state only if the row has
entered a new page, after it has folded the history of the finished page into it. A decode step of
one token therefore moves Dk Dv (4 + 4 / S) bytes of state for each head, and the deltas of the
history, which are at most 1/8 of that for pages of 16 tokens.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.delta import L2_EPS, TAPS, DeltaMemory, DeltaWeights, GatedNorm
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_BLOCK = 64  # channels of the values of a program of _apply without a norm


@triton.jit
def fold(
    state, keys, deltas, decays, base, end, HEADS: tl.constexpr, KEY_STRIDE: tl.constexpr,
    DELTA_STRIDE: tl.constexpr, DELTA_RING: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the state [DK, BLOCK] after the tokens of the history from `base` to `end` - 1.

    keys, deltas, decays: pointers to the first ring entry of this head and these channels.
    """
    for position in range(base, end):
        slot = position % (2 * SPAN)
        g = tl.load(decays + slot * HEADS)
        key = tl.load(keys + slot * KEY_STRIDE + tl.arange(0, DK)).to(tl.float32)
        slot = position % DELTA_RING
        delta = tl.load(deltas + slot * DELTA_STRIDE + tl.arange(0, BLOCK))
        state = state * tl.exp(g) + key[:, None] * delta[None, :]
    return state


@triton.jit
def convolve(
    mixed, ring, tails, conv, bias, position, stands, channels, token, mixed_stride,
    WIDTH: tl.constexpr, RING: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return silu(convolution + bias), float32, of `channels` for one token, and its input.

    mixed: pointer to the request's first token of the step; token: its index in the request. ring,
    tails: pointers to those of the row; inputs before the boundary `stands` are in tails. The
    caller puts the input into the ring, in place of the input that is RING tokens older.
    """
    new = tl.load(mixed + token * mixed_stride + channels)
    total = tl.load(conv + channels * TAPS + TAPS - 1).to(tl.float32) * new.to(tl.float32)
    for tap in tl.static_range(TAPS - 1):
        back = TAPS - 1 - tap
        # Masks, and no branches, let all loads of a program be under way at once.
        old = (token < back) & (position >= back)
        at = mixed + (token - back) * mixed_stride + channels
        value = tl.load(at, mask=(token >= back) & (channels >= 0), other=0.0).to(tl.float32)
        before = position - back
        kept = tails + (before - stands + TAPS - 1) * WIDTH
        at = tl.where(before < stands, kept, ring + (before + RING) % RING * WIDTH) + channels
        value += tl.load(at, mask=old & (channels >= 0), other=0.0).to(tl.float32)
        total += tl.load(conv + channels * TAPS + tap).to(tl.float32) * value
    total += bias
    return total / (1.0 + tl.exp(-total)), new


@triton.jit
def keep_tails(
    mixed, ring, tails, boundary, begin, channels, mixed_stride, WIDTH: tl.constexpr,
    RING: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Keep the inputs of `channels` before `boundary`, to which the state moves."""
    for back in tl.static_range(1, TAPS):
        index = boundary - back - begin
        new = (index >= 0) & (channels >= 0)
        old = (index < 0) & (channels >= 0)
        value = tl.load(mixed + index * mixed_stride + channels, mask=new, other=0.0)
        at = ring + (boundary - back) % RING * WIDTH + channels
        value += tl.load(at, mask=old, other=0.0)
        tl.store(tails + (TAPS - 1 - back) * WIDTH + channels, value)


@triton.jit
def decay_of(a, a_log, dt_bias):
    """Return g: -exp(a_log) * softplus(a + dt_bias), in float32."""
    x = a.to(tl.float32) + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit(
    do_not_specialize=["mixed_stride", "a_stride", "b_stride"],
    do_not_specialize_on_alignment=["rows", "start", "lengths", "first", "base", "target"],
)
def _inputs(
    mixed, a, b, conv, a_log, dt_bias, keys, decays, inputs, tails, q_out, k_out, v_out, history,
    scales, rows, start, lengths, first, base, target, mixed_stride, a_stride, b_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, RING: tl.constexpr, TAIL_STRIDE: tl.constexpr, TAPS: tl.constexpr,
    L2_EPS: tl.constexpr, HISTORY: tl.constexpr, GROUP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write q, k and v of the tokens, their products with the history, and their scales.

    history: float32 [T, Hv, 2, HISTORY]: the product of each key of the history with k, then with
    q, with its decay; 0 from the token on. scales: float32 [T, Hv, 4]: the decay of the state, beta
    and k q. The tokens of a chunk before `target` are kept as inputs only. TAIL_STRIDE: elements
    between the tails of two rows. GROUP: HEADS // KEY_HEADS, at most.
    """
    WIDTH: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    OF_KEY: tl.constexpr = HEADS // KEY_HEADS
    part, request = tl.program_id(0), tl.program_id(1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.load(rows + request).to(tl.int64)
    begin, length = tl.load(start + request), tl.load(lengths + request)
    if length == 0:
        return
    boundary, stands = tl.load(target + request), tl.load(base + request)
    token_zero = tl.load(first + request).to(tl.int64)
    inputs += row * (RING * WIDTH)
    tails += row * TAIL_STRIDE
    mixed += token_zero * mixed_stride
    skip = tl.maximum(boundary - begin, 0)
    earliest = tl.minimum(skip, tl.maximum(length - RING, 0))
    if part >= KEY_HEADS:
        head = part - KEY_HEADS
        value_column = tl.arange(0, DV)
        channels = 2 * KEY_HEADS * DK + head * DV + value_column
        if stands < boundary:
            keep_tails(
                mixed, inputs, tails, boundary, begin, channels, mixed_stride, WIDTH, RING, TAPS
            )
            tl.debug_barrier()  # the inputs are read before a new token takes the place of one
        for token in range(earliest, length):
            v, new = convolve(
                mixed, inputs, tails, conv, 0.0, begin + token, stands, channels, token,
                mixed_stride, WIDTH, RING, TAPS,
            )  # fmt: skip
            tl.store(inputs + (begin + token) % RING * WIDTH + channels, new)
            tl.store(v_out + ((token_zero + token) * HEADS + head) * DV + value_column, v)
        return
    key_head, column = part, tl.arange(0, DK)
    keys += row * (2 * SPAN * KEY_HEADS * DK) + key_head * DK
    decays += row * (2 * SPAN * HEADS) + key_head * OF_KEY
    group = tl.arange(0, GROUP)
    mine = group < OF_KEY
    heads = key_head * OF_KEY + group
    log_a = tl.load(a_log + heads, mask=mine, other=0.0)
    bias = tl.load(dt_bias + heads, mask=mine, other=0.0)
    past = tl.arange(0, HISTORY)
    count = begin + skip - boundary  # tokens of the history
    slot = (boundary + past) % (2 * SPAN)
    known = past < count
    k_at = keys + slot[:, None] * (KEY_HEADS * DK) + column[None, :]
    k_past = tl.load(k_at, mask=known[:, None], other=0.0)
    g_at = decays + slot[:, None] * HEADS + group[None, :]
    g_past = tl.load(g_at, mask=known[:, None] & mine[None, :], other=0.0)
    g_past = tl.cumsum(g_past, 0)  # [HISTORY, GROUP]
    total = tl.sum(tl.where((past == count - 1)[:, None], g_past, 0.0), 0)
    q_channels, k_channels = key_head * DK + column, (KEY_HEADS + key_head) * DK + column
    if stands < boundary:
        keep_tails(
            mixed, inputs, tails, boundary, begin, q_channels, mixed_stride, WIDTH, RING, TAPS
        )
        keep_tails(
            mixed, inputs, tails, boundary, begin, k_channels, mixed_stride, WIDTH, RING, TAPS
        )
        tl.debug_barrier()  # the inputs are read before a new token takes the place of one
    for token in range(earliest, length):
        position = begin + token
        q, q_new = convolve(
            mixed, inputs, tails, conv, 0.0, position, stands, q_channels, token, mixed_stride,
            WIDTH, RING, TAPS,
        )  # fmt: skip
        k, k_new = convolve(
            mixed, inputs, tails, conv, 0.0, position, stands, k_channels, token, mixed_stride,
            WIDTH, RING, TAPS,
        )  # fmt: skip
        tl.store(inputs + position % RING * WIDTH + q_channels, q_new)
        tl.store(inputs + position % RING * WIDTH + k_channels, k_new)
        if token >= skip:
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + L2_EPS) * DK**-0.5)
            narrow = (k * tl.rsqrt(tl.sum(k * k, 0) + L2_EPS)).to(keys.dtype.element_ty)
            wide = narrow.to(tl.float32)
            tl.store(q_out + ((token_zero + token) * KEY_HEADS + key_head) * DK + column, q)
            tl.store(k_out + ((token_zero + token) * KEY_HEADS + key_head) * DK + column, wide)
            rate = tl.load(a + (token_zero + token) * a_stride + heads, mask=mine, other=0.0)
            beta = tl.load(b + (token_zero + token) * b_stride + heads, mask=mine, other=0.0)
            beta = 1.0 / (1.0 + tl.exp(-beta.to(tl.float32)))
            g = tl.where(mine, decay_of(rate, log_a, bias), 0.0)
            total += g
            here, earlier = past == position - boundary, past < position - boundary
            weight = tl.exp(tl.where(earlier[:, None], total[None, :] - g_past, float("-inf")))
            out = history + ((token_zero + token) * HEADS + heads)[None, :] * (2 * HISTORY)
            similar = tl.sum(k_past.to(tl.float32) * wide[None, :], 1)
            tl.store(out + past[:, None], similar[:, None] * weight, mask=mine[None, :])
            attends = tl.sum(k_past.to(tl.float32) * q[None, :], 1)
            tl.store(out + HISTORY + past[:, None], attends[:, None] * weight, mask=mine[None, :])
            scale = scales + ((token_zero + token) * HEADS + heads) * 4
            tl.store(scale, tl.exp(total), mask=mine)
            tl.store(scale + 1, beta, mask=mine)
            tl.store(scale + 2, tl.zeros([GROUP], tl.float32) + tl.sum(wide * q, 0), mask=mine)
            tl.store(keys + position % (2 * SPAN) * (KEY_HEADS * DK) + column, narrow)
            tl.store(decays + position % (2 * SPAN) * HEADS + group, g, mask=mine)
            k_past = tl.where(here[:, None], narrow[None, :], k_past)
            g_past = tl.where(here[:, None], total[None, :], g_past)


@triton.jit(
    do_not_specialize=["gate_stride"],
    do_not_specialize_on_alignment=["rows", "start", "lengths", "first", "base", "target"],
)
def _apply(
    q_in, k_in, v_in, history, scales, state, keys, deltas, decays, norm_weight, gate, out,
    rows, start, lengths, first, base, target, gate_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """CHUNKS: whether kernels of chunks have moved states in this step. NORM: as in GatedNorm."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAP:
        gdc_launch_dependents()
        if CHUNKS:
            gdc_wait()
    key_head = head // (HEADS // KEY_HEADS)
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
    deltas += row * (DELTA_RING * HEADS * DV) + head * DV + block * BLOCK
    at = state + row * STATE_STRIDE + head * (DK * DV) + column[:, None] * DV + values[None, :]
    s = tl.load(at, mask=(stands > 0) & (column[:, None] < DK), other=0.0)
    if OVERLAP and not CHUNKS:
        gdc_wait()
    if stands < boundary:
        s = fold(
            s, keys + row * (2 * SPAN * KEY_HEADS * DK) + key_head * DK, deltas,
            decays + row * (2 * SPAN * HEADS) + head, stands, boundary, HEADS, KEY_HEADS * DK,
            HEADS * DV, DELTA_RING, SPAN, DK, BLOCK,
        )  # fmt: skip
        tl.store(at, s)
        tl.debug_barrier()  # all deltas are read before a new token takes the place of one
    past = tl.arange(0, DELTA_RING)
    slot = (boundary + past) % DELTA_RING
    known = past < begin + skip - boundary
    d_at = deltas + slot[:, None] * (HEADS * DV) + tl.arange(0, BLOCK)[None, :]
    d_past = tl.load(d_at, mask=known[:, None], other=0.0)
    for token in range(skip, length):
        index = token_zero + token
        q = tl.load(q_in + (index * KEY_HEADS + key_head) * DK + column)
        k = tl.load(k_in + (index * KEY_HEADS + key_head) * DK + column)
        index = index * HEADS + head
        v = tl.load(v_in + index * DV + values)
        similar = tl.load(history + index * (2 * DELTA_RING) + past)
        attends = tl.load(history + index * (2 * DELTA_RING) + DELTA_RING + past)
        decay, beta = tl.load(scales + index * 4), tl.load(scales + index * 4 + 1)
        same = tl.load(scales + index * 4 + 2)
        predicted = decay * tl.sum(s * k[:, None], 0) + tl.sum(d_past * similar[:, None], 0)
        d = beta * (v - predicted)
        o = decay * tl.sum(s * q[:, None], 0) + tl.sum(d_past * attends[:, None], 0) + d * same
        o = o.to(out.dtype.element_ty)
        if NORM:
            wide = o.to(tl.float32)
            opens = tl.load(gate + (token_zero + token) * gate_stride + head * DV + values)
            opens = opens.to(tl.float32)
            wide *= tl.rsqrt(tl.sum(wide * wide, 0) / DV + eps)
            wide *= tl.load(norm_weight + values).to(tl.float32)
            o = (wide * (opens / (1.0 + tl.exp(-opens)))).to(out.dtype.element_ty)
        tl.store(out + index * DV + values, o)
        position = begin + token
        tl.store(deltas + position % DELTA_RING * (HEADS * DV) + tl.arange(0, BLOCK), d)
        d_past = tl.where((past == position - boundary)[:, None], d[None, :], d_past)


_inputs_launcher = Launcher(_inputs, current_device)
_apply_launcher = Launcher(_apply, current_device)


def run_tokens(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaMemory,
    step: StateStep,
    out: Tensor,
    norm: GatedNorm | None,
) -> None:
    """Run the decode requests, and after run_chunks the tokens of chunks from their targets on.

    norm: applied to the outputs, or None.
    """
    key_heads, (heads, dk, dv) = memory.keys.shape[2], memory.state.shape[1:]
    rows, start, lengths, first, base, target, chunks, _ = step
    span, history, ring = memory.page_size, memory.deltas.shape[1], memory.inputs.shape[1]
    tokens, wide = len(mixed), torch.float32
    q, k = (mixed.new_empty(tokens, key_heads, dk, dtype=wide) for _ in range(2))
    v = mixed.new_empty(tokens, heads, dv, dtype=wide)
    products = mixed.new_empty(tokens, heads, 2, history, dtype=wide)
    scales = mixed.new_empty(tokens, heads, 4, dtype=wide)
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv, "SPAN": span}
    tail_stride, state_stride = memory.tails.stride(0), memory.state.stride(0)
    _inputs_launcher(
        (key_heads + heads, len(rows)),
        (
            *(mixed, a, b, *weights, memory.keys, memory.decays, memory.inputs, memory.tails),
            *(q, k, v, products, scales, rows, start, lengths, first, base, target),
        ),
        (),
        (mixed.stride(0), a.stride(0), b.stride(0)),
        (*sizes.values(), ring, tail_stride, history),
        lambda: Constants(
            sizes
            | {"RING": ring, "TAIL_STRIDE": tail_stride, "TAPS": TAPS, "L2_EPS": L2_EPS}
            | {"HISTORY": history, "GROUP": triton.next_power_of_2(heads // key_heads)}
            | {"OVERLAP": overlaps()},
            # With more warps and registers, too few programs of a multiprocessor run at once.
            {"num_warps": max(history // 8, 2), "maxnreg": 128, "launch_pdl": overlaps()},
        ),
    )
    block = min(_BLOCK, dv) if norm is None else dv
    state = memory.state, memory.keys, memory.deltas, memory.decays
    norm_weight, gate = (out, out) if norm is None else norm[:2]
    _apply_launcher(
        (dv // block, heads, len(rows)),
        (
            *(q, k, v, products, scales, *state, norm_weight, gate, out),
            *(rows, start, lengths, first, base, target),
        ),
        (),
        (gate.stride(0), 0.0 if norm is None else norm.eps),
        (*sizes.values(), history, state_stride, chunks > 0, norm is not None),
        lambda: Constants(
            sizes
            | {"DELTA_RING": history, "STATE_STRIDE": state_stride, "BLOCK": block}
            | {"CHUNKS": chunks > 0, "NORM": norm is not None, "OVERLAP": overlaps()},
            {"num_warps": max(block // 32, 1), "launch_pdl": overlaps()},
        ),
    )
