"""The experts of gpt-oss with weights of x's dtype: biases and a clamped SwiGLU.

The counterpart of moe_grouped.py: products of blocks of tokens that share an expert, with the same
bytes. mxfp4_few.py and mxfp4_blocks.py have the kernels for weights in MXFP4.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, float32

from minisgl.kernel.triton.moe_grouped import Tile, sum_parts, tiling_for
from minisgl.kernel.triton.moe_routing import Blocks, align


@triton.jit(do_not_specialize=["num_assigned"])
def _product(
    x,
    weight,
    bias,
    out,
    slots,
    owners,
    factors,
    num_assigned,
    N,
    K,
    x_stride,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of the product of a block of tokens with its expert's weight: moe_grouped._product.

    alpha, limit: of the SwiGLU.
    """
    tile = tl.program_id(0)
    block = tl.program_id(1)
    expert = tl.load(owners + block).to(tl.int64)
    if expert < 0:
        return
    slot = block * BM + tl.arange(0, BM)
    assigned = tl.load(slots + slot)
    live = assigned < num_assigned
    row = tl.arange(0, BN)
    k = tl.arange(0, BK)
    if GATED:
        n = tl.minimum(tile * (BN // 2) + row // 2, N - 1) + (row % 2) * N + expert * (2 * N)
        source = assigned // TOP_K
    else:
        n = tl.minimum(tile * BN + row, N - 1) + expert * N
        source = slot
    weight_at = weight + n[:, None] * K + k[None, :]
    x_at = x + source[None, :].to(tl.int64) * x_stride + k[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        left = K - step * BK
        w = tl.load(weight_at + step * BK, mask=(k < left)[None, :], other=0.0)
        v = tl.load(x_at + step * BK, mask=live[None, :] & (k < left)[:, None], other=0.0)
        total = tl.dot(w, v, total, input_precision="ieee")
    total += tl.load(bias + n).to(tl.float32)[:, None]
    if GATED:
        pairs = total.reshape(BN // 2, 2, BM).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
        target = slot
    else:
        value = total * tl.load(factors + assigned, mask=live, other=0.0)[None, :]
        n = tile * BN + row
        target = assigned
    at = out + target[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


def experts_of_many(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    experts: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """As MoeBackend.forward, after the routing, in four launches. No host sync.

    x: [T, H], unit stride in H. gate_up, down, biases: as in ExpertWeights. weights, experts: as in
    moe_grouped.experts_of_many. alpha, limit: as in ClampedSwiglu.
    """
    num_experts, top_k = len(gate_up), experts.shape[1]
    tiling = tiling_for(experts.numel(), num_experts, x.dtype == float32)
    blocks = align(experts, num_experts, tiling.tokens)
    hidden = x.new_empty((len(blocks.slots), down.shape[2]))
    parts = x.new_empty((experts.numel(), x.shape[1]))
    own = (blocks, weights, top_k, alpha, limit)
    _launch(x, gate_up, biases[0], hidden, *own, tiling.gate_up, True)
    _launch(hidden, down, biases[1], parts, *own, tiling.down, False)
    return sum_parts(parts, top_k)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    blocks: Blocks,
    factors: Tensor,
    top_k: int,
    alpha: float,
    limit: float,
    tile: Tile,
    gated: bool,
) -> None:
    height, width = out.shape[1], x.shape[1]
    rows = tile.rows // 2 if gated else tile.rows
    _product[(triton.cdiv(height, rows), len(blocks.owners))](
        x,
        weight,
        bias,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        width,
        x.stride(0),
        alpha,
        limit,
        TOP_K=top_k,
        GATED=gated,
        BM=blocks.size,
        BN=tile.rows,
        BK=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
