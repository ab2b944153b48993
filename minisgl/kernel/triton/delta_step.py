"""Gated delta nets, a few tokens of each request: decode steps, and the last tokens of a chunk.

A program of `_inputs` convolves some channels of the values of a request's tokens, or those of one
key head, whose keys and queries it compares with the history. Other programs of it move the states
of requests that have entered a new page: they fold the history of the finished page into them.
`_apply` has some channels of the values of one head, or all of them if it also applies the norm and
the gate. It reads this part of the state once, in a step without chunks before `_inputs` is
complete, unless the state moves. A decode step of one token therefore moves Dk Dv (4 + 8 / S) bytes
of state for each head, and the deltas of the history, which are at most 1/8 of that for pages of 16
tokens.
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
from minisgl.kernel.triton.history import convolve, fold_page, keep_tails
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_BLOCK = 64  # channels of the values of a program of _apply without a norm
_VALUES = 512  # channels of the values of a program of _inputs, at most
_FOLDED = 16  # channels of the values of a program that moves states, at most
_REQS = 16  # requests of such a program: with pages of 16 tokens, about one enters a page
# Three programs of _apply run on a multiprocessor at once, if each request has one token.
_ONE_REGISTERS = 168


@triton.jit
def decay_of(a, a_log, dt_bias):
    """Return g: -exp(a_log) * softplus(a + dt_bias), in float32."""
    x = a.to(tl.float32) + dt_bias
    return -tl.exp(a_log) * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _fold_states(
    request, channel, state, keys, deltas, decays, rows, start, lengths, base, target, num_reqs,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    REQS: tl.constexpr,
):  # fmt: skip
    """Move BLOCK channels of the states of REQS requests to their targets, but not of chunks."""
    column, values = tl.arange(0, DK), tl.arange(0, BLOCK)
    head = channel // DV
    place = tl.arange(0, REQS)
    reqs, exists = request + place, request + place < num_reqs
    begin, targets = tl.load(start + reqs, exists, 0), tl.load(target + reqs, exists, 0)
    moves = (tl.load(base + reqs, exists, 0) < targets) & (targets <= begin)
    moves &= tl.load(lengths + reqs, exists, 0) > 0
    moving = tl.sum(moves.to(tl.int32) << place, 0)  # a bit for each request
    for index in range(REQS):
        if (moving >> index) & 1:
            stands, boundary = tl.load(base + request + index), tl.load(target + request + index)
            row = tl.load(rows + request + index).to(tl.int64)
            at = state + row * STATE_STRIDE + head * (DK * DV) + channel % DV
            at += column[:, None] * DV + values[None, :]
            s = tl.load(at, mask=(stands > 0) & (column[:, None] < DK), other=0.0)
            s = fold_page(
                s, keys + row * (2 * SPAN * KEY_HEADS * DK) + head // (HEADS // KEY_HEADS) * DK,
                deltas + row * (DELTA_RING * HEADS * DV) + channel,
                decays + row * (2 * SPAN * HEADS) + head, stands, boundary, HEADS, KEY_HEADS * DK,
                HEADS * DV, DELTA_RING, SPAN, DK, BLOCK,
            )  # fmt: skip
            tl.store(at, s)


@triton.jit(
    do_not_specialize=["mixed_stride", "a_stride", "b_stride", "num_reqs"],
    do_not_specialize_on_alignment=["rows", "start", "lengths", "first", "base", "target"],
)
def _inputs(
    mixed, a, b, conv, a_log, dt_bias, keys, decays, inputs, tails, q_out, k_out, v_out, history,
    scales, state, deltas, rows, start, lengths, first, base, target, mixed_stride, a_stride,
    b_stride, num_reqs,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, RING: tl.constexpr, TAIL_STRIDE: tl.constexpr, TAPS: tl.constexpr,
    L2_EPS: tl.constexpr, HISTORY: tl.constexpr, STATE_STRIDE: tl.constexpr, GROUP: tl.constexpr,
    VALUES: tl.constexpr, FOLDED: tl.constexpr, REQS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Write q, k and v of the tokens, their products with the history, and their scales.

    history: float32 [T, Hv, 2, HISTORY]: the product of each key of the history with k, then with
    q, with its decay; 0 from the token on. scales: float32 [T, Hv, 4]: the decay of the state, beta
    and k q. The tokens of a chunk before `target` are kept as inputs only. TAIL_STRIDE: elements
    between the tails of two rows. GROUP: HEADS // KEY_HEADS, rounded up to a power of two. VALUES:
    channels of a program of values. FOLDED, REQS: channels and requests of one that moves states.
    """
    WIDTH: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    OF_KEY: tl.constexpr = HEADS // KEY_HEADS
    PARTS: tl.constexpr = KEY_HEADS + HEADS * DV // VALUES
    BLOCKS: tl.constexpr = HEADS * DV // FOLDED
    program, folds = tl.program_id(0), BLOCKS * tl.cdiv(num_reqs, REQS)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    if program < folds:
        _fold_states(
            program // BLOCKS * REQS, program % BLOCKS * FOLDED, state, keys, deltas, decays, rows,
            start, lengths, base, target, num_reqs, KEY_HEADS, HEADS, DK, DV, SPAN, HISTORY,
            STATE_STRIDE, FOLDED, REQS,
        )  # fmt: skip
        return
    part, request = (program - folds) % PARTS, (program - folds) // PARTS
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
        values = (part - KEY_HEADS) * VALUES + tl.arange(0, VALUES)
        channels = 2 * KEY_HEADS * DK + values
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
            tl.store(v_out + (token_zero + token) * (HEADS * DV) + values, v)
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
    q_in, k_in, v_in, history, scales, state, deltas, norm_weight, gate, out,
    rows, start, lengths, first, base, target, gate_stride, eps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, ONE: tl.constexpr, NORM: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """CHUNKS: whether kernels of chunks have moved states in this step. NORM: as in GatedNorm.

    ONE: whether each request has one token at most.
    """
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
    column, values = tl.arange(0, DK), block * BLOCK + tl.arange(0, BLOCK)
    deltas += row * (DELTA_RING * HEADS * DV) + head * DV + block * BLOCK
    at = state + row * STATE_STRIDE + head * (DK * DV) + column[:, None] * DV + values[None, :]
    ready = (boundary > 0) & (column[:, None] < DK)
    if OVERLAP and not CHUNKS:
        s = tl.load(at, mask=ready & (stands == boundary), other=0.0)
        gdc_wait()
        if stands < boundary:  # `_inputs` has moved the state
            s = tl.load(at)
    else:
        s = tl.load(at, mask=ready, other=0.0)
    past = tl.arange(0, DELTA_RING)
    slot = (boundary + past) % DELTA_RING
    known = past < begin + skip - boundary
    d_at = deltas + slot[:, None] * (HEADS * DV) + tl.arange(0, BLOCK)[None, :]
    d_past = tl.load(d_at, mask=known[:, None], other=0.0)
    for token in range(skip, skip + 1 if ONE else length):
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
        if not ONE:
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
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv}
    tail_stride, state_stride = memory.tails.stride(0), memory.state.stride(0)
    reqs, values, folded = len(rows), min(heads * dv & -(heads * dv), _VALUES), min(_FOLDED, dv)
    folds = heads * dv // folded * triton.cdiv(reqs, _REQS)
    _inputs_launcher(
        (folds + (key_heads + heads * dv // values) * reqs,),
        (
            *(mixed, a, b, *weights, memory.keys, memory.decays, memory.inputs, memory.tails),
            *(q, k, v, products, scales, memory.state, memory.deltas),
            *(rows, start, lengths, first, base, target),
        ),
        (),
        (mixed.stride(0), a.stride(0), b.stride(0), reqs),
        (*sizes.values(), span, ring, tail_stride, history, state_stride),
        lambda: Constants(
            sizes
            | {"SPAN": span, "RING": ring, "TAIL_STRIDE": tail_stride, "TAPS": TAPS}
            | {"L2_EPS": L2_EPS, "HISTORY": history, "STATE_STRIDE": state_stride}
            | {"GROUP": triton.next_power_of_2(heads // key_heads), "VALUES": values}
            | {"FOLDED": folded, "REQS": _REQS, "OVERLAP": overlaps()},
            # With more warps and registers, too few programs of a multiprocessor run at once.
            {"num_warps": max(history // 8, 2), "maxnreg": 128, "launch_pdl": overlaps()},
        ),
    )
    block = min(_BLOCK, dv) if norm is None else dv
    one = chunks == 0 and history == span  # a step with drafts has a longer history
    norm_weight, gate = (out, out) if norm is None else norm[:2]
    _apply_launcher(
        (dv // block, heads, len(rows)),
        (
            *(q, k, v, products, scales, memory.state, memory.deltas, norm_weight, gate, out),
            *(rows, start, lengths, first, base, target),
        ),
        (),
        (gate.stride(0), 0.0 if norm is None else norm.eps),
        (*sizes.values(), history, state_stride, chunks > 0, one, norm is not None),
        lambda: Constants(
            sizes
            | {"DELTA_RING": history, "STATE_STRIDE": state_stride, "BLOCK": block}
            | {"CHUNKS": chunks > 0, "ONE": one, "NORM": norm is not None, "OVERLAP": overlaps()},
            {"num_warps": max(block // 32, 1), "launch_pdl": overlaps()}
            | ({"maxnreg": _ONE_REGISTERS} if one else {}),
        ),
    )
