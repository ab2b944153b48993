"""The products of moe_grouped where there are so many tokens that arithmetic decides.

Weights, and what the first product leaves, come by the copy engine of Hopper GPUs (TMA), which
takes a row and a column where pointers take registers: tiles can be twice as wide. On one H200 with
8,192 tokens of 8 experts, H 2048, I 768: gate and up 838 us (by pointers 918), down 459 (508), the
same bits. 128 tokens a block fill the last block of each of 128 experts by half: 12 % are wasted.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from minisgl.kernel.triton.moe_routing import Blocks

_TOKENS = 128  # of a block
_K = 64


@triton.jit(do_not_specialize=["num_assigned"])
def _gate_up(
    x,
    weight,
    out,
    slots,
    owners,
    num_assigned,
    N,
    K,
    x_stride,
    TOP_K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tokens of x to slots of out. weight: a descriptor of [E * 2N, K]."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(owners + block)
    if expert < 0:
        return
    slot = block * BM + tl.arange(0, BM)
    assigned = tl.load(slots + slot)
    live = (assigned < num_assigned)[:, None]
    x_at = x + (assigned // TOP_K)[:, None].to(tl.int64) * x_stride + tl.arange(0, BK)[None, :]
    row = expert * (2 * N) + tile * BN
    gate = tl.zeros([BM, BN], tl.float32)
    up = tl.zeros([BM, BN], tl.float32)
    for step in tl.range(0, K // BK, num_stages=STAGES):
        v = tl.load(x_at + step * BK, mask=live, other=0.0)
        gate = tl.dot(v, weight.load([row, step * BK]).T, gate)
        up = tl.dot(v, weight.load([row + N, step * BK]).T, up)
    value = gate / (1.0 + tl.exp(-gate)) * up
    n = (tile * BN + tl.arange(0, BN))[None, :]
    at = out + slot[:, None].to(tl.int64) * N + n
    tl.store(at, value.to(out.dtype.element_ty), mask=live & (n < N))


@triton.jit(do_not_specialize=["num_assigned"])
def _down(
    hidden,
    weight,
    out,
    slots,
    owners,
    scales,
    num_assigned,
    N,
    K,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Slots of hidden to assignments of out, scaled. Descriptors of [slots, K] and [E * N, K]."""
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(owners + block)
    if expert < 0:
        return
    total = tl.zeros([BM, BN], tl.float32)
    row = expert * N + tile * BN
    for step in tl.range(0, K // BK, num_stages=STAGES):
        v = hidden.load([block * BM, step * BK])
        total = tl.dot(v, weight.load([row, step * BK]).T, total)
    assigned = tl.load(slots + block * BM + tl.arange(0, BM))
    live = assigned < num_assigned
    value = total * tl.load(scales + assigned, mask=live, other=0.0)[:, None]
    n = (tile * BN + tl.arange(0, BN))[None, :]
    at = out + assigned[:, None].to(tl.int64) * N + n
    tl.store(at, value.to(out.dtype.element_ty), mask=live[:, None] & (n < N))


def takes(x: Tensor, inner: int, tokens: int) -> bool:
    """Whether there are products here for x [T, H], experts [.., inner] and blocks of `tokens`."""
    whole = x.shape[1] % _K == 0 and inner % _K == 0
    if not whole or tokens != _TOKENS or x.element_size() != 2 or x.is_cpu:
        return False
    return bool(driver.active.get_current_target().arch >= 90)


def gate_up(x: Tensor, weight: Tensor, out: Tensor, blocks: Blocks, top_k: int) -> None:
    """x: [T, H] that is taken, unit stride in H; weight: [E, 2I, H]; out: [slots, I], written."""
    inner, width = out.shape[1], x.shape[1]
    columns = 128 if inner % 128 == 0 else 64
    _gate_up[(triton.cdiv(inner, columns), len(blocks.owners))](
        x,
        _rows(weight.flatten(0, 1), columns),
        out,
        blocks.slots,
        blocks.owners,
        top_k * len(x),
        inner,
        width,
        x.stride(0),
        TOP_K=top_k,
        BM=blocks.size,
        BN=columns,
        BK=_K,
        STAGES=4 if columns == 128 else 3,
        num_warps=8 if columns == 128 else 4,
    )


def down(hidden: Tensor, weight: Tensor, out: Tensor, blocks: Blocks, scales: Tensor) -> None:
    """hidden: [slots, I]; weight: [E, H, I]; scales: one an assignment; out: [T top_k, H]."""
    width, inner = out.shape[1], hidden.shape[1]
    columns = 256
    _down[(triton.cdiv(width, columns), len(blocks.owners))](
        _rows(hidden, blocks.size),
        _rows(weight.flatten(0, 1), columns),
        out,
        blocks.slots,
        blocks.owners,
        scales,
        scales.numel(),
        width,
        inner,
        BM=blocks.size,
        BN=columns,
        BK=_K,
        STAGES=3,
        num_warps=8,
    )


def _rows(matrix: Tensor, rows: int) -> TensorDescriptor:
    """What the copy engine needs to fetch [rows, _K] of a contiguous matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, _K])
