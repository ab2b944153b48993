"""Gated delta nets, prompts: the tokens of chunks up to the last boundary, 64 tokens at a time.

With G the sum of g from the start of 64 tokens up to each, A = tril(beta k k^T e^(Gi-Gj), -1),
U = (I+A)^-1 beta v and W = (I+A)^-1 beta k e^G, 64 tokens change the state S to

    V = U - W S;  O = q e^G S + tril(q k^T e^(Gi-Gj)) V;  S = e^G_end S + (k e^(G_end-G))^T V

Three kernels: `_prepare` convolves all tokens. `_solve` makes U, W and tril(q k^T e^(Gi-Gj)) of all
blocks of 64 tokens side by side. `_pass` goes through the blocks of a request, one after another.

Source: the chunkwise form of Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2024).
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.delta import L2_EPS, TAPS, DeltaMemory, DeltaWeights, Inputs
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.delta_step import decay_of
from minisgl.kernel.triton.history import fold
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, has_large_tiles

_TOKENS = 64  # tokens of a block
_PREPARED = 32  # tokens of a program of _prepare
_REQS = 64  # requests that _solve reads at a time
_MULTIPROCESSORS = 132  # of a Hopper GPU; only the size of the programs of _pass depends on it


@triton.jit
def request_of(first, token, exists, num_reqs, search_steps):
    """Return the index of the last request that begins at or before each token."""
    low = tl.zeros(token.shape, tl.int32)
    high = low + num_reqs
    for _ in range(search_steps):
        middle = (low + high) // 2
        after = tl.load(first + middle, mask=exists, other=0) > token
        high = tl.where(after, middle, high)
        low = tl.where(after, low, middle)
    return low


@triton.jit
def convolve_tokens(
    mixed, inputs, tails, conv, bias, token, within, position, stands, row, exists, channels,
    mixed_stride, WIDTH: tl.constexpr, RING: tl.constexpr, TAIL_STRIDE: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """Return silu(convolution + bias), float32 [tokens, channels]. within: indices in the chunk."""
    early = tl.min(tl.where(exists, within, TAPS), 0) < TAPS - 1
    total = tl.zeros([token.shape[0], channels.shape[0]], tl.float32)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        new = exists & (within >= back)
        at = mixed + (token - back)[:, None] * mixed_stride + channels[None, :]
        value = tl.load(at, mask=new[:, None], other=0.0).to(tl.float32)
        if early:
            old = exists & (within < back) & (position >= back)
            before = position - back
            kept = tails + row * TAIL_STRIDE + (before - stands + TAPS - 1) * WIDTH
            at = inputs + (row * RING + (before + RING) % RING) * WIDTH
            at = tl.where(before < stands, kept, at)[:, None] + channels[None, :]
            value += tl.load(at, mask=old[:, None], other=0.0).to(tl.float32)
        total += tl.load(conv + channels * TAPS + tap).to(tl.float32)[None, :] * value
    total += bias
    return total / (1.0 + tl.exp(-total))


@triton.jit(
    do_not_specialize=[
        "a_stride",
        "b_stride",
        "num_tokens",
        "num_reqs",
        "search_steps",
    ],
    do_not_specialize_on_alignment=["rows", "start", "first", "base"],
)
def _prepare(
    mixed, a, b, conv, a_log, dt_bias, inputs, tails, q_out, k_out, v_out, g_out, beta_out,
    rows, start, first, base,
    mixed_stride, a_stride, b_stride, num_tokens, num_reqs, search_steps,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    RING: tl.constexpr, TAIL_STRIDE: tl.constexpr, TAPS: tl.constexpr, L2_EPS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """One head of the queries, of the keys or of the values, for some tokens."""
    WIDTH: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    part = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    token = token.to(tl.int64)
    low = request_of(first, token, exists, num_reqs, search_steps)
    row = tl.load(rows + low, mask=exists, other=0).to(tl.int64)
    within = (token - tl.load(first + low, mask=exists, other=0)).to(tl.int32)
    position = tl.load(start + low, mask=exists, other=0) + within
    stands = tl.load(base + low, mask=exists, other=0)
    if part < 2 * KEY_HEADS:
        column = tl.arange(0, DK)
        channels = part * DK + column
        x = convolve_tokens(
            mixed, inputs, tails, conv, 0.0, token, within, position, stands, row, exists,
            channels, mixed_stride, WIDTH, RING, TAIL_STRIDE, TAPS,
        )  # fmt: skip
        x *= tl.rsqrt(tl.sum(x * x, 1) + L2_EPS)[:, None]
        at = (token * KEY_HEADS + part % KEY_HEADS)[:, None] * DK + column[None, :]
        if part < KEY_HEADS:
            x *= DK**-0.5
            tl.store(q_out + at, x.to(q_out.dtype.element_ty), mask=exists[:, None])
        else:
            tl.store(k_out + at, x.to(k_out.dtype.element_ty), mask=exists[:, None])
    else:
        head = part - 2 * KEY_HEADS
        value_column = tl.arange(0, DV)
        value_channels = 2 * KEY_HEADS * DK + head * DV + value_column
        value = convolve_tokens(
            mixed, inputs, tails, conv, 0.0, token, within, position, stands, row, exists,
            value_channels, mixed_stride, WIDTH, RING, TAIL_STRIDE, TAPS,
        )  # fmt: skip
        place = token * HEADS + head
        tl.store(
            v_out + place[:, None] * DV + value_column[None, :],
            value.to(v_out.dtype.element_ty),
            mask=exists[:, None],
        )
        rate = tl.load(a + token * a_stride + head, mask=exists, other=0.0)
        tl.store(
            g_out + place,
            decay_of(rate, tl.load(a_log + head), tl.load(dt_bias + head)),
            mask=exists,
        )
        strength = tl.load(b + token * b_stride + head, mask=exists, other=0.0).to(tl.float32)
        tl.store(beta_out + place, 1.0 / (1.0 + tl.exp(-strength)), mask=exists)


@triton.jit
def _invert_blocks(x, n, index, SMALL: tl.constexpr, LARGE: tl.constexpr, PRECISION: tl.constexpr):
    """Invert I + N in blocks of LARGE, given the inverse `x` in blocks of SMALL.

    x, n: [..., m, m]; n strictly lower triangular. With M = x N outside of the small blocks, M^4 is
    zero for LARGE = 4 SMALL, so the inverse is (I - M)(I + M^2) x. Entries grow by at most a factor
    of 16, which an expansion over all tokens at once would not bound.
    """
    row, column = index // SMALL, index // SMALL
    outside = (row[:, None] != column[None, :]) & (
        (index // LARGE)[:, None] == (index // LARGE)[None, :]
    )
    if len(x.shape) == 3:
        outside = outside[None, :, :]
    m = tl.dot(x, tl.where(outside, n, 0.0), input_precision=PRECISION)
    x += tl.dot(tl.dot(m, m, input_precision=PRECISION), x, input_precision=PRECISION)
    return x - tl.dot(m, x, input_precision=PRECISION)


@triton.jit
def _invert(n, TOKENS: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of I + n, [TOKENS, TOKENS], n strictly lower triangular."""
    BLOCKS: tl.constexpr = TOKENS // 16
    block, small = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same = block[:, None, None, None] == block[None, None, :, None]
    diagonal = tl.sum(tl.where(same, tl.reshape(n, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)
    x = tl.zeros([BLOCKS, 16, 16], tl.float32)
    x += tl.where(small[:, None] == small[None, :], 1.0, 0.0)[None, :, :]
    x = _invert_blocks(x, diagonal, small, 1, 4, PRECISION)
    x = _invert_blocks(x, diagonal, small, 4, 16, PRECISION)
    x = tl.where(same, x[:, :, None, :], 0.0)
    return _invert_blocks(
        tl.reshape(x, [TOKENS, TOKENS]), n, tl.arange(0, TOKENS), 16, TOKENS, PRECISION
    )


@triton.jit(
    do_not_specialize=["num_reqs"],
    do_not_specialize_on_alignment=["start", "first", "target"],
)
def _solve(
    q, k, v, g, beta, u_out, w_out, scores_out, start, first, target, num_reqs,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TOKENS: tl.constexpr, REQS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Make U, W and tril(q k^T e^(Gi-Gj)) of one block and head, and replace g by G."""
    head, block = tl.program_id(0), tl.program_id(1)
    earlier, count, zero, within = 0, 0, 0, 0
    for begin in range(0, num_reqs, REQS):  # the request of the block, and its first token
        reqs = begin + tl.arange(0, REQS)
        exists = reqs < num_reqs
        counts = tl.load(target + reqs, mask=exists, other=0)
        counts = tl.maximum(counts - tl.load(start + reqs, mask=exists, other=0), 0)
        blocks = (counts + TOKENS - 1) // TOKENS
        ends = tl.cumsum(blocks, 0) + earlier
        mine = (ends > block) & (ends - blocks <= block)
        earlier += tl.sum(blocks, 0)
        count += tl.sum(tl.where(mine, counts, 0), 0)
        within += tl.sum(tl.where(mine, (block - ends + blocks) * TOKENS, 0), 0)
        zero += tl.sum(tl.where(mine, tl.load(first + reqs, mask=exists, other=0), 0), 0)
    if block >= earlier:
        return
    count -= within
    index = tl.arange(0, TOKENS)
    valid = index < count
    token = (zero + within + index).to(tl.int64)
    at = token * HEADS + head
    total = tl.cumsum(tl.load(g + at, mask=valid, other=0.0), 0)
    tl.store(g + at, total, mask=valid)
    strength = tl.load(beta + at, mask=valid, other=0.0)
    key_head = head // (HEADS // KEY_HEADS)
    column = tl.arange(0, DK)
    key_at = (token * KEY_HEADS + key_head)[:, None] * DK + column[None, :]
    key = tl.load(k + key_at, mask=valid[:, None], other=0.0)
    query = tl.load(q + key_at, mask=valid[:, None], other=0.0)
    lower = index[:, None] > index[None, :]
    decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0))
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    scores = tl.where(index[:, None] >= index[None, :], scores * decay, 0.0)
    scores_at = at[:, None] * TOKENS + index[None, :]
    tl.store(scores_out + scores_at, scores.to(scores_out.dtype.element_ty), mask=valid[:, None])
    n = tl.dot(key, tl.trans(key), input_precision="ieee") * decay * strength[:, None]
    x = _invert(tl.where(lower, n, 0.0), TOKENS, PRECISION)
    x *= strength[None, :]
    value_column = tl.arange(0, DV)
    value_at = at[:, None] * DV + value_column[None, :]
    value = tl.load(v + value_at, mask=valid[:, None], other=0.0)
    u = tl.dot(x.to(value.dtype), value, input_precision="ieee")
    tl.store(u_out + value_at, u.to(u_out.dtype.element_ty), mask=valid[:, None])
    w = tl.dot((x * tl.exp(total)[None, :]).to(key.dtype), key, input_precision="ieee")
    tl.store(
        w_out + at[:, None] * DK + column[None, :],
        w.to(w_out.dtype.element_ty),
        mask=valid[:, None],
    )


@triton.jit(do_not_specialize_on_alignment=["rows", "start", "first", "base", "target"])
def _pass(
    q, k, u, w, scores, g, state, keys, deltas, decays, out,
    rows, start, first, base, target,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the blocks of one request, for one head and some channels of its values."""
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    starts, stands = tl.load(start + request), tl.load(base + request)
    count = tl.load(target + request) - starts
    if count <= 0:
        return
    row = tl.load(rows + request).to(tl.int64)
    token_zero = tl.load(first + request).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    column = tl.arange(0, DK)
    values = block * BLOCK + tl.arange(0, BLOCK)
    at = state + row * STATE_STRIDE + head * (DK * DV) + column[:, None] * DV + values[None, :]
    s = tl.load(at, mask=(stands > 0) & (column[:, None] < DK), other=0.0)
    if stands < starts:
        s = fold(
            s,
            keys + row * (2 * SPAN * KEY_HEADS * DK) + key_head * DK,
            deltas + row * (DELTA_RING * HEADS * DV) + head * DV + block * BLOCK,
            decays + row * (2 * SPAN * HEADS) + head,
            stands, starts, HEADS, KEY_HEADS * DK, HEADS * DV, DELTA_RING, SPAN, DK, BLOCK,
        )  # fmt: skip
    index = tl.arange(0, TOKENS)
    for within in tl.range(0, count, TOKENS, num_stages=STAGES):
        valid = index < count - within
        token = token_zero + within + index
        key_at = (token * KEY_HEADS + key_head)[:, None] * DK + column[None, :]
        query = tl.load(q + key_at, mask=valid[:, None], other=0.0)
        key = tl.load(k + key_at, mask=valid[:, None], other=0.0)
        at_head = token * HEADS + head
        weight = tl.load(
            w + at_head[:, None] * DK + column[None, :], mask=valid[:, None], other=0.0
        )
        value = tl.load(u + at_head[:, None] * DV + values[None, :], mask=valid[:, None], other=0.0)
        score = tl.load(
            scores + at_head[:, None] * TOKENS + index[None, :], mask=valid[:, None], other=0.0
        )
        total = tl.load(g + at_head, mask=valid, other=0.0)
        last = tl.sum(tl.where(index == tl.minimum(count - within, TOKENS) - 1, total, 0.0), 0)
        narrow = s.to(key.dtype)
        change = value.to(tl.float32) - tl.dot(weight, narrow, input_precision="ieee")
        o = tl.dot(query, narrow, input_precision="ieee") * tl.exp(total)[:, None]
        o += tl.dot(score, change.to(key.dtype), input_precision="ieee")
        out_at = out + at_head[:, None] * DV + values[None, :]
        tl.store(out_at, o.to(out.dtype.element_ty), mask=valid[:, None])
        later = tl.where(valid, tl.exp(last - total), 0.0)
        change = (change * later[:, None]).to(key.dtype)
        s = s * tl.exp(last) + tl.dot(tl.trans(key), change, input_precision="ieee")
    tl.store(at, s)


_prepare_launcher = Launcher(_prepare, current_device)
_solve_launcher = Launcher(_solve, current_device)
_pass_launcher = Launcher(_pass, current_device)


def prepare(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaMemory,
    step: StateStep,
    spare: int = 0,
) -> Inputs:
    """Convolve all tokens of the step, as gated_delta does. The memory is only read.

    spare: zeros for this number of tokens follow those of the step.
    """
    key_heads, (heads, dk, dv) = memory.keys.shape[2], memory.state.shape[1:]
    tokens, reqs = len(mixed), len(step.rows)
    q, k = (mixed.new_empty(tokens + spare, key_heads, dk) for _ in range(2))
    v = mixed.new_empty(tokens + spare, heads, dv)
    g, beta = (memory.state.new_empty(tokens + spare, heads) for _ in range(2))
    if spare:
        for part in (q, k, v, g, beta):
            part[tokens:].zero_()
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv}
    ring, tail_stride = memory.inputs.shape[1], memory.tails.stride(0)
    _prepare_launcher(
        (2 * key_heads + heads, triton.cdiv(tokens, _PREPARED)),
        (
            *(mixed, a, b, *weights, memory.inputs, memory.tails),
            *(q, k, v, g, beta, step.rows, step.start, step.first, step.base),
        ),
        (mixed.stride(0),),  # a multiple of 16 lets a thread load 16 bytes at once
        (a.stride(0), b.stride(0), tokens, reqs, (reqs - 1).bit_length()),
        (*sizes.values(), ring, tail_stride),
        lambda: Constants(
            sizes
            | {"RING": ring, "TAIL_STRIDE": tail_stride, "TAPS": TAPS, "L2_EPS": L2_EPS}
            | {"TOKENS": _PREPARED},
            {"num_warps": 4},
        ),
    )
    return Inputs(q, k, v, g, beta)


def run_rule(inputs: Inputs, memory: DeltaMemory, step: StateStep, out: Tensor) -> None:
    """Run the tokens of the chunks up to their targets, and move the states there (delta.py).

    Decode requests have no such tokens. Replaces inputs.g by sums of it.
    """
    q, k, v, g, beta = inputs
    key_heads, (heads, dk, dv) = memory.keys.shape[2], memory.state.shape[1:]
    rows, start, _, first, base, target, chunks, _ = step
    tokens, reqs, wide = len(q), len(rows), q.dtype == torch.float32
    u, w, scores = (q.new_empty(tokens, heads, n) for n in (dv, dk, _TOKENS))
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv}
    _solve_launcher(
        (heads, tokens // _TOKENS + reqs),
        (q, k, v, g, beta, u, w, scores, start, first, target),
        (),
        (reqs,),
        (*sizes.values(),),
        lambda: Constants(
            {**sizes, "TOKENS": _TOKENS, "REQS": _REQS, "PRECISION": "ieee" if wide else "tf32"},
            {"num_warps": 4},
        ),
    )
    # Larger programs read less in sum. Smaller ones use more multiprocessors.
    block = min(32 if heads * chunks * (dv // 32) <= _MULTIPROCESSORS else 64, dv)
    span, delta_ring, state_stride = (
        memory.page_size,
        memory.deltas.shape[1],
        memory.state.stride(0),
    )
    state = memory.state, memory.keys, memory.deltas, memory.decays
    _pass_launcher(
        (dv // block, heads, reqs),
        (q, k, u, w, scores, g, *state, out, rows, start, first, base, target),
        (),
        (),
        (*sizes.values(), span, delta_ring, state_stride, block),
        lambda: Constants(
            {
                **sizes,
                "SPAN": span,
                "DELTA_RING": delta_ring,
                "STATE_STRIDE": state_stride,
                "TOKENS": _TOKENS,
                "BLOCK": block,
                "STAGES": 1 if wide else 3 if has_large_tiles() else 2,  # 3 take 109 KiB
            },
            {"num_warps": 4},
        ),
    )
