"""The experts of a handful of tokens: each product is a matrix times one vector.

Programs are many and small, and each asks for all of its weights at once, so that the whole chip
reads although a token's experts are narrow. Experts that tokens share come from the L2 cache.

Bytes: 6 H I for each of T * top_k assignments.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

# Of the weights, a program: rows of gate and of up, their columns at once; rows of `down` of all
# experts, its columns at once. The best of 22 and 31 on one H200, 2026-11-21, H 2048, I 768.
_ROWS, _COLUMNS = 2, 2048
_DOWN_ROWS, _DOWN_COLUMNS = 16, 256


@triton.jit
def _gate_up(
    x,
    weight,
    out,
    experts,
    inner,
    width,
    x_stride,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    assignment = tl.program_id(1)
    expert = tl.load(experts + assignment).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < inner
    gate_at = weight + (expert * 2 * inner + n[:, None]) * width
    up_at = weight + (expert * 2 * inner + inner + n[:, None]) * width
    x_at = x + (assignment // TOP_K) * x_stride
    gate = tl.zeros([ROWS], tl.float32)
    up = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (k < width)[None, :]
        g = tl.load(gate_at + k[None, :], mask=mask, other=0.0)
        u = tl.load(up_at + k[None, :], mask=mask, other=0.0)
        v = tl.load(x_at + k, mask=k < width, other=0.0).to(tl.float32)[None, :]
        gate += tl.sum(g.to(tl.float32) * v, axis=1)
        up += tl.sum(u.to(tl.float32) * v, axis=1)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + assignment * inner + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    hidden,
    weight,
    out,
    experts,
    weights,
    width,
    inner,
    TOP_K: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(1)
    j = tl.arange(0, PLACES)
    kept = j < TOP_K
    assignment = token * TOP_K + j
    expert = tl.load(experts + assignment, mask=kept, other=0).to(tl.int64)
    scale = tl.load(weights + assignment, mask=kept, other=0.0)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < width
    rows = expert[:, None] * width + n[None, :]
    read = kept[:, None] & inside[None, :]
    total = tl.zeros([PLACES, ROWS], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = k < inner
        at = weight + rows[:, :, None] * inner + k[None, None, :]
        w = tl.load(at, mask=read[:, :, None] & live[None, None, :], other=0.0)
        at = hidden + assignment[:, None] * inner + k[None, :]
        v = tl.load(at, mask=kept[:, None] & live[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * v.to(tl.float32)[:, None, :], axis=2)
    value = tl.sum(total * scale[:, None], axis=0)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=inside)


def experts_of_few(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, experts: Tensor
) -> Tensor:
    """As MoeBackend.forward, after the routing. Two launches, no host sync.

    x: [T, H], unit stride in H; weights: float32 [T, top_k], experts: int32 [T, top_k].
    """
    num_tokens, width = x.shape
    top_k, inner = experts.shape[1], down.shape[2]
    hidden = x.new_empty((num_tokens * top_k, inner))
    _gate_up[(triton.cdiv(inner, _ROWS), num_tokens * top_k)](
        x,
        gate_up,
        hidden,
        experts,
        inner,
        width,
        x.stride(0),
        TOP_K=top_k,
        ROWS=_ROWS,
        BLOCK=min(triton.next_power_of_2(width), _COLUMNS),
        num_warps=2,
    )
    places = triton.next_power_of_2(top_k)
    rows = max(_DOWN_ROWS // places, 1)
    out = x.new_empty((num_tokens, width))
    _down[(triton.cdiv(width, rows), num_tokens)](
        hidden,
        down,
        out,
        experts,
        weights,
        width,
        inner,
        TOP_K=top_k,
        PLACES=places,
        ROWS=rows,
        BLOCK=min(triton.next_power_of_2(inner), _DOWN_COLUMNS),
        num_warps=4,
    )
    return out
