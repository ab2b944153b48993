"""The products of MXFP4 experts with blocks of few tokens that share an expert.

The counterpart of stacked_moe._product for blocks of so few tokens that the loads of the weights,
and not the matrix unit, limit the speed. A warp multiplies 16 rows of the weight with the tokens of
a block. Each lane decodes its part of the weights for itself (mxfp4.py).
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Final

import triton
import triton.language as tl
from torch import Tensor, int32

from minisgl.kernel.triton.moe_routing import Blocks
from minisgl.kernel.triton.mxfp4 import is_fast, operand, reduction, takes

# Tokens of a block, and the weights that a program loads at once: 16 rows for each of _WARPS warps.
# A lane makes _CHUNKS loads of 32 weights for a row, and _STAGES loads are in flight. These are the
# fastest of 8 choices for 5 to 32 tokens, on one H200 with the shapes of gpt-oss-20b, 2026-11-23.
TOKENS: Final = 8
_WARPS, _CHUNKS, _STAGES = 4, 2, 3
# The most assignments per expert for which these products are faster than stacked_moe's.
_MOST_ASSIGNED: Final = 4


def takes_blocks(x: Tensor, num_assigned: int, num_experts: int) -> bool:
    """Whether `product` accepts x, and is faster than stacked_moe for this number of assignments.

    x: the tokens.
    """
    return takes(x) and num_assigned <= _MOST_ASSIGNED * num_experts


@triton.jit(do_not_specialize=["num_assigned"])
def _product(
    x,
    weight,
    scales,
    bias,
    out,
    slots,
    owners,
    factors,
    num_assigned,
    N,
    blocks,
    x_stride,
    alpha,
    limit,
    reduced,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    WARPS: tl.constexpr,
    CHUNKS: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """As stacked_moe._product. weight: int32 words; a row has `blocks` blocks of 32 weights."""
    tile = tl.program_id(0)
    owned = tl.program_id(1)
    expert = tl.load(owners + owned).to(tl.int64)
    if expert < 0:
        return
    TYPE: tl.constexpr = x.dtype.element_ty
    slot = owned * BM + tl.arange(0, BM)
    assigned = tl.load(slots + slot)
    live = assigned < num_assigned
    r = tl.arange(0, CHUNKS * 16 * WARPS)
    half, warp, i = r // (8 * WARPS) % 2, r // 8 % WARPS, r % 8
    if GATED:  # a warp has 8 rows of the gate and the same rows of up
        rows = expert * (2 * N) + half * N + tl.minimum((tile * WARPS + warp) * 8 + i, N - 1)
        source = assigned // TOP_K
    else:
        rows = expert * N + tl.minimum((tile * WARPS + warp) * 16 + half * 8 + i, N - 1)
        source = slot
    chunk = (r // (16 * WARPS))[:, None]
    word = chunk * 16 + tl.arange(0, 16)[None, :]
    block = chunk * 4 + tl.arange(0, 4)[None, :]
    k = tl.arange(0, CHUNKS * 128)[None, :]
    word_at = weight + rows[:, None] * (blocks * 4) + word
    scale_at = scales + rows[:, None] * blocks + block
    x_at = x + source[:, None].to(tl.int64) * x_stride + k
    total = tl.zeros([WARPS, 16, BM], tl.float32)
    powers = tl.load(scale_at, mask=block < blocks, other=0)
    for step in tl.range(0, tl.cdiv(blocks, 4 * CHUNKS), num_stages=STAGES):
        left = blocks - step * (4 * CHUNKS)
        after = left - 4 * CHUNKS
        next_powers = tl.load(scale_at + (blocks - after), mask=block < after, other=0)
        words = tl.load(word_at + step * (16 * CHUNKS), mask=word // 4 < left, other=0)
        v = tl.load(x_at + step * (128 * CHUNKS), mask=live[:, None] & (k < left * 32), other=0.0)
        w = operand(words, powers, CHUNKS, WARPS, TYPE, FAST)
        powers = next_powers
        v = tl.permute(tl.reshape(v, [BM, CHUNKS, 4, 4, 2, 2, 2]), (1, 3, 5, 2, 6, 4, 0))
        v = tl.reshape(v, [CHUNKS * 128, BM])
        v = tl.broadcast_to(v[None, :, :], [WARPS, CHUNKS * 128, BM])
        total = tl.dot(w, v, total, input_precision="ieee")
    total *= reduced
    if GATED:
        n = tile * (8 * WARPS) + tl.arange(0, 8 * WARPS)
        inside = n < N
        pairs = tl.permute(tl.reshape(total, [WARPS, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = tl.split(tl.reshape(pairs, [8 * WARPS, BM, 2]))
        at = bias + expert * (2 * N) + n
        gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]
        up += tl.load(at + N, mask=inside, other=0.0).to(tl.float32)[:, None]
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        target = slot
    else:
        n = tile * (16 * WARPS) + tl.arange(0, 16 * WARPS)
        inside = n < N
        value = tl.reshape(total, [16 * WARPS, BM])
        value += tl.load(bias + expert * N + n, mask=inside, other=0.0).to(tl.float32)[:, None]
        value *= tl.load(factors + assigned, mask=live, other=0.0)[None, :]
        target = assigned
    at = out + target[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :] & inside[:, None])


def product(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor,
    out: Tensor,
    blocks: Blocks,
    factors: Tensor,
    top_k: int,
    alpha: float,
    limit: float,
    gated: bool,
) -> None:
    """As stacked_moe._launch, for an x that mxfp4.takes accepts and blocks of TOKENS tokens."""
    height = out.shape[1]
    rows = _WARPS * (8 if gated else 16)
    _product[(triton.cdiv(height, rows), len(blocks.owners))](
        x,
        weight.view(int32),
        scales,
        bias,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        scales.shape[2],
        x.stride(0),
        alpha,
        limit,
        reduction(),
        TOP_K=top_k,
        GATED=gated,
        BM=blocks.size,
        WARPS=_WARPS,
        CHUNKS=_CHUNKS,
        STAGES=_STAGES,
        FAST=is_fast(),
        num_warps=_WARPS,
    )
