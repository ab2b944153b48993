"""Mamba-2, prompts: the tokens of chunks up to the last boundary, 64 tokens at a time.

With G the sum of g from the start of 64 tokens up to each, they change the state S to

    O = q e^G S + tril(q k^T e^(Gi-Gj)) (dt v) + D v;  S = e^G_end S + (k e^(G_end-G))^T (dt v)

`_prepare` convolves all tokens. `_pass` goes through the blocks of a request, one after another.

Source: the chunkwise form of Mamba-2 (Dao, Gu, 2024).
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.delta import TAPS, DeltaMemory
from minisgl.kernel.ssd import SsdWeights
from minisgl.kernel.states import StateStep
from minisgl.kernel.triton.delta_chunk import convolve_tokens, request_of
from minisgl.kernel.triton.history import fold
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, has_large_tiles
from minisgl.kernel.triton.ssd_step import channel_block, softplus

_TOKENS = 64  # tokens of a block
_PREPARED = 32  # tokens of a program of _prepare
_CHANNELS = 128  # channels of a program of _prepare, at most
_BLOCK = 64  # channels of the values of a program of _pass, at most


@triton.jit(
    do_not_specialize=["num_tokens", "num_reqs", "search_steps"],
    do_not_specialize_on_alignment=["rows", "start", "first", "base"],
)
def _prepare(
    mixed, conv, bias, inputs, tails, x_out, rows, start, first, base,
    mixed_stride, num_tokens, num_reqs, search_steps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RING: tl.constexpr, TAIL_STRIDE: tl.constexpr,
    TAPS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Write x_out, [T, WIDTH]: some channels of some tokens."""
    channels = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    exists = token < num_tokens
    token = token.to(tl.int64)
    request = request_of(first, token, exists, num_reqs, search_steps)
    row = tl.load(rows + request, mask=exists, other=0).to(tl.int64)
    within = (token - tl.load(first + request, mask=exists, other=0)).to(tl.int32)
    position = tl.load(start + request, mask=exists, other=0) + within
    stands = tl.load(base + request, mask=exists, other=0)
    added = tl.load(bias + channels).to(tl.float32)[None, :]
    x = convolve_tokens(
        mixed, inputs, tails, conv, added, token, within, position, stands, row, exists, channels,
        mixed_stride, WIDTH, RING, TAIL_STRIDE, TAPS,
    )  # fmt: skip
    at = x_out + token[:, None] * WIDTH + channels[None, :]
    tl.store(at, x.to(x_out.dtype.element_ty), mask=exists[:, None])


@triton.jit(
    do_not_specialize=["dt_stride"],
    do_not_specialize_on_alignment=["rows", "start", "first", "base", "target"],
)
def _pass(
    x, dt, a_log, dt_bias, skips, state, keys, deltas, decays, out,
    rows, start, first, base, target, dt_stride,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    SPAN: tl.constexpr, DELTA_RING: tl.constexpr, STATE_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go through the blocks of one request, for one head and some channels of its values."""
    WIDTH: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    block, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    starts, stands = tl.load(start + request), tl.load(base + request)
    count = tl.load(target + request) - starts
    if count <= 0:
        return
    row = tl.load(rows + request).to(tl.int64)
    token_zero = tl.load(first + request).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    column, values = tl.arange(0, DK), block * BLOCK + tl.arange(0, BLOCK)
    rate, bias = -tl.exp(tl.load(a_log + head)), tl.load(dt_bias + head)
    direct = tl.load(skips + head)
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
    lower = index[:, None] >= index[None, :]
    for within in tl.range(0, count, TOKENS, num_stages=STAGES):
        valid = index < count - within
        token = token_zero + within + index
        here = x + token[:, None] * WIDTH
        query = here + key_head * DK + column[None, :]
        query = tl.load(query, mask=valid[:, None], other=0.0)
        key = here + (KEY_HEADS + key_head) * DK + column[None, :]
        key = tl.load(key, mask=valid[:, None], other=0.0)
        value = here + 2 * KEY_HEADS * DK + head * DV + values[None, :]
        value = tl.load(value, mask=valid[:, None], other=0.0).to(tl.float32)
        size = tl.load(dt + token * dt_stride + head, mask=valid, other=0.0).to(tl.float32)
        size = tl.where(valid, softplus(size + bias), 0.0)
        total, last = tl.cumsum(rate * size, 0), rate * tl.sum(size, 0)
        change = value * size[:, None]
        decay = tl.exp(tl.where(lower, total[:, None] - total[None, :], 0.0))
        score = tl.dot(query, tl.trans(key), input_precision="ieee")
        score = tl.where(lower, score * decay, 0.0).to(key.dtype)
        o = tl.dot(query, s.to(key.dtype), input_precision="ieee") * tl.exp(total)[:, None]
        o += tl.dot(score, change.to(key.dtype), input_precision="ieee") + direct * value
        out_at = out + (token * HEADS + head)[:, None] * DV + values[None, :]
        tl.store(out_at, o.to(out.dtype.element_ty), mask=valid[:, None])
        change = (change * tl.exp(last - total)[:, None]).to(key.dtype)
        s = s * tl.exp(last) + tl.dot(tl.trans(key), change, input_precision="ieee")
    tl.store(at, s)


_prepare_launcher = Launcher(_prepare, current_device)
_pass_launcher = Launcher(_pass, current_device)


def run_chunks(
    mixed: Tensor,
    dt: Tensor,
    weights: SsdWeights,
    memory: DeltaMemory,
    step: StateStep,
    out: Tensor,
) -> None:
    """Run the tokens of the chunks up to their targets, and move the states there (ssd.py).

    Decode requests have no such tokens.
    """
    key_heads, (heads, dk, dv) = memory.keys.shape[2], memory.state.shape[1:]
    rows, start, _, first, base, target, *_ = step
    (tokens, width), reqs = mixed.shape, len(rows)
    x = torch.empty_like(mixed, memory_format=torch.contiguous_format)
    ring, tail_stride = memory.inputs.shape[1], memory.tails.stride(0)
    channels = channel_block(width, _CHANNELS)
    _prepare_launcher(
        (width // channels, triton.cdiv(tokens, _PREPARED)),
        (
            *(mixed, weights.conv, weights.bias, memory.inputs, memory.tails, x),
            *(rows, start, first, base),
        ),
        (mixed.stride(0),),  # a multiple of 16 lets a thread load 16 bytes at once
        (tokens, reqs, (reqs - 1).bit_length()),
        (width, ring, tail_stride),
        lambda: Constants(
            {"WIDTH": width, "BLOCK": channels, "RING": ring, "TAIL_STRIDE": tail_stride}
            | {"TAPS": TAPS, "TOKENS": _PREPARED},
            {"num_warps": 4},
        ),
    )
    sizes = {"KEY_HEADS": key_heads, "HEADS": heads, "DK": dk, "DV": dv}
    span, delta_ring = memory.page_size, memory.deltas.shape[1]
    block, state_stride = channel_block(dv, _BLOCK), memory.state.stride(0)
    wide = mixed.dtype == torch.float32
    state = memory.state, memory.keys, memory.deltas, memory.decays
    _pass_launcher(
        (dv // block, heads, reqs),
        (
            *(x, dt, weights.a_log, weights.dt_bias, weights.skip, *state, out),
            *(rows, start, first, base, target),
        ),
        (),
        (dt.stride(0),),
        (*sizes.values(), span, delta_ring, state_stride),
        lambda: Constants(
            sizes
            | {"SPAN": span, "DELTA_RING": delta_ring, "STATE_STRIDE": state_stride}
            | {"TOKENS": _TOKENS, "BLOCK": block}
            | {"STAGES": 1 if wide else 3 if has_large_tiles() else 2},
            {"num_warps": 4},
        ),
    )
