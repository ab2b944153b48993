"""The experts of gpt-oss: biases and a clamped SwiGLU, with weights in MXFP4 or of x's dtype.

The counterpart of moe_grouped.py: products of blocks of tokens that share an expert. A program
reads packed weights and decodes them in registers, exactly: each weight has few bits, and its scale
is a power of two. The activations keep their dtype. mxfp4_few.py and mxfp4_blocks.py have faster
kernels for MXFP4 and few tokens.

Bytes in MXFP4, without those that L2 serves: 1.6 H I for each expert that has tokens; the rest as
in moe_grouped.py.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, bfloat16, float32

from minisgl.kernel.triton import mxfp4_blocks
from minisgl.kernel.triton.moe_grouped import Tile, sum_parts, tiling_for
from minisgl.kernel.triton.moe_routing import Blocks, align
from minisgl.kernel.triton.mxfp4 import number
from minisgl.kernel.triton.overlap import overlaps

# The most rows of a tile. A program holds the decoded weights beside the sums. Not measured yet.
_MOST_ROWS = 128


@triton.jit
def decode(codes, scales, TYPE: tl.constexpr, FAST: tl.constexpr):
    """MXFP4 to TYPE, exactly.

    codes: uint8 [ROWS, BYTES], two codes in a byte. scales: uint8 [ROWS, BYTES / 16]. Returns
    [ROWS, 2 * BYTES].

    FAST, for bfloat16 only: integer instructions convert two numbers at once. The 3 low bits of a
    code become the two lowest bits of bfloat16's exponent and the highest bit of its mantissa. A
    product with 2^126 corrects the bias, also of the subnormal number 0.5.
    """
    ROWS: tl.constexpr = codes.shape[0]
    BLOCKS: tl.constexpr = scales.shape[1]
    if FAST:
        even, odd = tl.inline_asm_elementwise(
            """
            {
            .reg .b32 a, b, m, s, scale;
            mov.b32 scale, 0x7e807e80;
            prmt.b32 a, $4, 0, 0x4140;
            prmt.b32 b, $4, 0, 0x4342;
            shl.b32 m, a, 6;
            shl.b32 s, a, 12;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $0, m, scale;
            shl.b32 m, b, 6;
            shl.b32 s, b, 12;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $1, m, scale;
            shl.b32 m, a, 2;
            shl.b32 s, a, 8;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $2, m, scale;
            shl.b32 m, b, 2;
            shl.b32 s, b, 8;
            and.b32 m, m, 0x01c001c0;
            lop3.b32 m, s, 0x80008000, m, 0xea;
            mul.rn.bf16x2 $3, m, scale;
            }
            """,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        even, odd = number(codes.to(tl.int32) & 15, TYPE), number(codes.to(tl.int32) >> 4, TYPE)
    numbers = tl.reshape(tl.interleave(even, odd), [ROWS, BLOCKS, 32])
    exponents = scales.to(tl.int32)
    # The exponent 0 is 2^-127, which is subnormal in float32.
    bits = tl.where(exponents == 0, 1 << 22, exponents << 23)
    powers = bits.to(tl.float32, bitcast=True).to(TYPE)
    return tl.reshape(numbers * powers[:, :, None], [ROWS, 32 * BLOCKS])


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
    K,
    x_stride,
    row_stride,
    scale_stride,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    PACKED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
):
    """One tile of the product of a block of tokens with its expert's weight: moe_grouped._product.

    PACKED: the weights are MXFP4, with K / 32 scales in a row. alpha, limit: of the SwiGLU.
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
    weight_at = weight + n[:, None] * row_stride
    scale_at = scales + n[:, None] * scale_stride
    x_at = x + source[None, :].to(tl.int64) * x_stride + k[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        left = K - step * BK
        if PACKED:
            byte = tl.arange(0, BK // 2)
            group = tl.arange(0, BK // 32)
            inside = (byte < left // 2)[None, :]
            codes = tl.load(weight_at + step * (BK // 2) + byte[None, :], mask=inside, other=0)
            inside = (group < left // 32)[None, :]
            powers = tl.load(scale_at + step * (BK // 32) + group[None, :], mask=inside, other=0)
            w = decode(codes, powers, x.dtype.element_ty, FAST)
        else:
            w = tl.load(weight_at + step * BK + k[None, :], mask=(k < left)[None, :], other=0.0)
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


def experts_of_any(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    biases: tuple[Tensor, Tensor],
    weights: Tensor,
    experts: Tensor,
    alpha: float,
    limit: float,
) -> Tensor:
    """As MoeBackend.forward, after the routing, in four launches. No host sync.

    x: [T, H], unit stride in H. gate_up, down, biases: as in ExpertWeights. scales: mxfp4_scales;
    None: the weights have x's dtype. weights, experts: as in moe_grouped.experts_of_many. alpha,
    limit: as in ClampedSwiglu.
    """
    num_experts, top_k = len(gate_up), experts.shape[1]
    inner = gate_up.shape[1] // 2
    num_assigned = experts.numel()
    tiling = tiling_for(num_assigned, num_experts, x.dtype == float32)
    few = scales is not None and mxfp4_blocks.takes_blocks(x, num_assigned, num_experts)
    blocks = align(experts, num_experts, mxfp4_blocks.TOKENS if few else tiling.tokens)
    hidden = x.new_empty((len(blocks.slots), inner))
    parts = x.new_empty((num_assigned, x.shape[1]))
    own = (blocks, weights, top_k, alpha, limit)
    if scales is not None and few:
        product = mxfp4_blocks.product
        product(x, gate_up, scales[0], biases[0], hidden, *own, gated=True)
        product(hidden, down, scales[1], biases[1], parts, *own, gated=False)
    else:
        gate_up_scales, down_scales = scales or (None, None)
        _launch(x, gate_up, gate_up_scales, biases[0], hidden, *own, tiling.gate_up, True)
        _launch(hidden, down, down_scales, biases[1], parts, *own, tiling.down, False)
    return sum_parts(parts, top_k)


def _launch(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
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
    tall = min(tile.rows, _MOST_ROWS)
    rows = tall // 2 if gated else tall
    _product[(triton.cdiv(height, rows), len(blocks.owners))](
        x,
        weight,
        weight if scales is None else scales,
        bias,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        width,
        x.stride(0),
        weight.shape[2],
        0 if scales is None else scales.shape[2],
        alpha,
        limit,
        TOP_K=top_k,
        GATED=gated,
        PACKED=scales is not None,
        BM=blocks.size,
        BN=tall,
        BK=tile.columns,
        STAGES=tile.stages,
        FAST=x.dtype == bfloat16 and overlaps(),  # mul.bf16x2 needs Hopper or later, as PDL does
        num_warps=tile.warps,
    )
