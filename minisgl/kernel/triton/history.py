"""The history of a row, as the kernels of layers with recurrent states read and write it.

The state S of a row stands at a boundary (kernel/states.py). Rings keep the inputs of the
convolution, and the keys, deltas and decays of the tokens after the boundary.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl


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
def fold_page(
    state, keys, deltas, decays, base, end, HEADS: tl.constexpr, KEY_STRIDE: tl.constexpr,
    DELTA_STRIDE: tl.constexpr, DELTA_RING: tl.constexpr, SPAN: tl.constexpr, DK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """See fold. The tokens are at most SPAN. All their loads are under way at once."""
    past = tl.arange(0, SPAN)
    known = base + past < end
    slot = (base + past) % (2 * SPAN)
    g = tl.load(decays + slot * HEADS, mask=known, other=0.0)
    key_at = keys + slot[None, :] * KEY_STRIDE + tl.arange(0, DK)[:, None]
    key = tl.load(key_at, mask=known[None, :], other=0.0).to(tl.float32)
    delta_at = deltas + ((base + past) % DELTA_RING)[:, None] * DELTA_STRIDE
    delta = tl.load(delta_at + tl.arange(0, BLOCK)[None, :], mask=known[:, None], other=0.0)
    total = tl.sum(g, 0)
    delta *= tl.exp(total - tl.cumsum(g, 0))[:, None]
    return tl.dot(key, delta, state * tl.exp(total), input_precision="tf32x3")


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
