"""The experts of many tokens, as products of blocks of tokens that share an expert.

Each expert's weights are read once. A program holds rows of the weight as the tall operand of the
matrix unit and a block of tokens as the narrow one, so that an expert with few tokens wastes little
work. Rows of gate and up alternate in a tile, so that a program applies the activation before it
writes. Experts without a gate have rows of up alone. Biased experts are those of gpt-oss, with a
clamped SwiGLU. A last kernel sums the outputs of a token's experts in a fixed order. There are no
atomics, so results do not change between runs.

With FP8 weights, the activations are quantised, with one scale for each token or for each 128 of
its columns: the matrix unit then reads the weights without a conversion. If the activations are not
bfloat16, or a block of weights has neither 128 columns nor all of them, the weights are converted
in registers, exactly. The scale of a block of weights multiplies the partial sum of its columns; a
scale for a whole row multiplies the result.

An assignment is a token with one of its experts. A slot is the place of an assignment in the blocks
that minisgl.kernel.triton.moe_routing.align makes.

Bytes in 16-bit types, without those that L2 serves: 6 H I per expert that has tokens, and 2 I + 4 H
per assignment.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, bfloat16, float32

from minisgl.kernel.activation import Activation
from minisgl.kernel.fp8_weights import Scales
from minisgl.kernel.triton import moe_tiles
from minisgl.kernel.triton.elementwise import activated
from minisgl.kernel.triton.fp8 import widen
from minisgl.kernel.triton.fp8_quantise import quantise_rows
from minisgl.kernel.triton.moe_routing import Blocks, Layer, Matrix, align
from minisgl.kernel.triton.overlap import overlaps, shared_bytes

_COLUMNS = 1024


@triton.jit(do_not_specialize=["num_assigned", "x_scale_stride"])
def _product(
    x,
    x_scales,
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
    x_scale_stride,
    alpha,
    limit,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRODUCTS: tl.constexpr,
    BIASED: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    QUANTISED: tl.constexpr,
    FAST: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of the product of a block of tokens with its expert's weight.

    With PRODUCTS (Activation.products), x holds tokens and out holds slots, after the activation.
    With 0, x holds slots and out holds assignments, multiplied by their factors. EACH: experts of a
    token, with the shared ones. alpha, limit: of the SwiGLU, if BIASED.

    SCALED: the weight is FP8 with a scale for each block. SCALE_COLUMNS 0: a block has all columns.
    QUANTISED: x is FP8 too. x_scales has its scales, one for each row and SCALE_COLUMNS columns.
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
    if PRODUCTS == 2:
        n = tl.minimum(tile * (BN // 2) + row // 2, N - 1) + (row % 2) * N
        height = 2 * N
    else:
        n = tl.minimum(tile * BN + row, N - 1)
        height = N
    source = assigned // EACH if PRODUCTS else slot
    weight_at = weight + (expert * height + n)[:, None] * K + k[None, :]
    x_at = x + source[None, :].to(tl.int64) * x_stride + k[:, None]
    if SCALED:
        groups = 1 if SCALE_COLUMNS == 0 else tl.cdiv(K, SCALE_COLUMNS)
        scale_at = scales + (expert * tl.cdiv(height, SCALE_ROWS) + n // SCALE_ROWS) * groups
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, tl.cdiv(K, BK), num_stages=STAGES):
        if WHOLE:
            w = tl.load(weight_at + step * BK)
            v = tl.load(x_at + step * BK, mask=live[None, :], other=0.0)
        else:
            left = K - step * BK
            w = tl.load(weight_at + step * BK, mask=(k < left)[None, :], other=0.0)
            v = tl.load(x_at + step * BK, mask=live[None, :] & (k < left)[:, None], other=0.0)
        if SCALED and not QUANTISED:
            w = widen(w, x.dtype.element_ty, FAST)
        if SCALE_COLUMNS == 0:
            total = tl.dot(w, v, total, input_precision="ieee")
        else:
            group = step * BK // SCALE_COLUMNS
            part = tl.dot(w, v, input_precision="ieee") * tl.load(scale_at + group)[:, None]
            if QUANTISED:
                x_scale_at = x_scales + group * x_scale_stride + source
                part *= tl.load(x_scale_at, mask=live, other=0.0)[None, :]
            total += part
    if SCALED and SCALE_COLUMNS == 0:
        total *= tl.load(scale_at)[:, None]
        if QUANTISED:
            total *= tl.load(x_scales + source, mask=live, other=0.0)[None, :]
    if BIASED:
        total += tl.load(bias + expert * height + n).to(tl.float32)[:, None]
    if PRODUCTS == 2:
        pairs = total.reshape(BN // 2, 2, BM).permute(0, 2, 1)
        gate, up = tl.split(pairs)
        if BIASED:
            gate = tl.minimum(gate, limit)
            up = tl.maximum(tl.minimum(up, limit), -limit)
            value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
        else:
            value = activated(gate, up, ACTIVATION)
        n = tile * (BN // 2) + tl.arange(0, BN // 2)
        target = slot
    elif PRODUCTS == 1:
        value = activated(total, total, ACTIVATION)
        n = tile * BN + row
        target = slot
    else:
        value = total * tl.load(factors + assigned, mask=live, other=0.0)[None, :]
        n = tile * BN + row
        target = assigned
    at = out + target[None, :].to(tl.int64) * N + n[:, None]
    tl.store(at, value.to(out.dtype.element_ty), mask=live[None, :] & (n < N)[:, None])


@triton.jit
def _sum(parts, out, width, EACH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(EACH):
        at = parts + (token * EACH + j) * width + cols
        total += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * width + cols, total.to(out.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """The tile of the weight that a program multiplies.

    rows, columns  of the weight that a program loads at once.
    stages         loads in flight.
    warps          warps of a program.
    """

    rows: int
    columns: int
    stages: int
    warps: int


class Tiling(NamedTuple):
    """Tokens of a block, and the tiles of both products."""

    tokens: int
    gate_up: Tile
    down: Tile


_EXACT = Tiling(16, Tile(32, 32, 2, 4), Tile(32, 32, 2, 4))  # for float32, which tests use
_NARROW = Tile(64, 128, 3, 4)
# For bfloat16 and float16: the most assignments per expert for which a tiling is used. Each tiling
# is the fastest of 44 on one H200 with H 2048, I 768, 128 experts and 8 experts per token
# (2026-11-21, torch 2.11, Triton 3.6).
_TILINGS = (
    (8.0, Tiling(16, _NARROW, _NARROW)),
    (20.0, Tiling(32, _NARROW, _NARROW)),
    (64.0, Tiling(64, Tile(128, 64, 3, 4), Tile(128, 64, 4, 4))),
    (float("inf"), Tiling(128, Tile(128, 64, 3, 8), Tile(256, 64, 4, 8))),
)


def tiling_for(num_assigned: int, num_experts: int, exact: bool) -> Tiling:
    """The tiling for this number of assignments. exact: the tensors are float32."""
    if exact:
        return _EXACT
    mean = num_assigned / num_experts
    tiling = next(tiling for most, tiling in _TILINGS if mean <= most)
    # The loads of 128 tokens take 144 KiB.
    return tiling if tiling.tokens <= 64 or shared_bytes() >= 144 * 1024 else _TILINGS[-2][1]


def experts_of_many(
    x: Tensor,
    layer: Layer,
    weights: Tensor,
    experts: Tensor,
    shared: int = 0,
    tiling: Tiling | None = None,
    quantised: bool | None = None,
) -> Tensor:
    """As MoeBackend.forward, after the routing, in four or five launches. No host sync.

    x: [T, H], unit stride in H. layer: of unquantised experts, or of FP8 experts with the scales of
    fp8_few.experts_of_few, with 32 columns or more. weights: float32 [T, A]; experts: int32 [T, A];
    both as moe_choice.route returns them. shared: the last experts of `layer` that are shared.
    tiling: if None, `tiling_for` chooses it from the other experts. With blocks of 128 tokens,
    moe_tiles.py computes the products if it supports their shapes. quantised: whether to quantise
    activations for FP8 weights; None: only bfloat16 ones.
    """
    gate_up, down, activation = layer
    has_bias, is_plain = gate_up[2] is not None, gate_up[1] is None
    is_plain &= activation is Activation.SILU
    is_clamped = isinstance(activation, tuple)
    assert has_bias == is_clamped, "biased experts have a clamped SwiGLU; this is a bug"
    inner, width = down[0].shape[2], x.shape[1]
    num_experts, each = len(down[0]) - shared, experts.shape[1]
    if tiling is None:
        tiling = tiling_for(len(x) * (each - shared), num_experts, x.dtype == float32)
    if quantised is None:
        quantised = x.dtype == bfloat16
    blocks = align(experts, num_experts, tiling.tokens, shared)
    hidden = x.new_empty((len(blocks.slots), inner))
    parts = x.new_empty((experts.numel(), width))
    if is_plain and moe_tiles.takes(x, inner, blocks.size):
        moe_tiles.gate_up(x, gate_up[0], hidden, blocks, each)
        moe_tiles.down(hidden, down[0], parts, blocks, weights)
    else:
        own = (blocks, weights, each, quantised)
        _launch(x, gate_up, hidden, *own, tiling.gate_up, activation)
        _launch(hidden, down, parts, *own, tiling.down, None)
    return sum_parts(parts, each)


def _launch(
    x: Tensor,
    matrix: Matrix,
    out: Tensor,
    blocks: Blocks,
    factors: Tensor,
    each: int,
    quantised: bool,
    tile: Tile,
    activation: Activation | tuple[float, float] | None,
) -> None:
    """activation: None: the product is the last one."""
    weight, scales, bias = matrix
    height, width = out.shape[1], weight.shape[2]
    in_loop = 0 if scales is None else columns_in_loop(scales, width)
    # A scale of activations is for 128 columns. With weights in blocks of another width, the
    # activations are therefore not quantised.
    quantised = quantised and scales is not None and in_loop in (0, 128)
    x_scales, stride, columns = factors, 0, tile.columns
    if quantised:
        x, x_scales = quantise_rows(x, grouped=in_loop > 0)
        stride, columns = x_scales.stride(1), 2 * tile.columns  # as many bytes as of bfloat16
    # With blocks, a program holds a second tile of sums, and 256 rows would not fit its registers.
    tall = min(tile.rows, 128) if in_loop else tile.rows
    products, name, constants = 0, "", (0.0, 0.0)
    if isinstance(activation, Activation):
        products, name = activation.products, activation.value
    elif activation is not None:
        products, constants = 2, activation
    rows, columns = tall // max(products, 1), min(columns, in_loop or columns)
    _product[(triton.cdiv(height, rows), len(blocks.owners))](
        x,
        x_scales,
        weight,
        factors if scales is None else scales.values,
        weight if bias is None else bias,
        out,
        blocks.slots,
        blocks.owners,
        factors,
        factors.numel(),
        height,
        width,
        x.stride(0),
        stride,
        *constants,
        EACH=each,
        ACTIVATION=name,
        PRODUCTS=products,
        BIASED=bias is not None,
        SCALED=scales is not None,
        SCALE_ROWS=1 if scales is None else scales.rows,
        SCALE_COLUMNS=in_loop,
        QUANTISED=quantised,
        FAST=out.dtype == bfloat16 and overlaps(),  # `widen` needs Hopper or later, as PDL does
        BM=blocks.size,
        BN=tall,
        BK=columns,
        WHOLE=scales is None and width % columns == 0,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )


def columns_in_loop(scales: Scales, width: int) -> int:
    """The columns of a block; 0 if a block has all columns of the matrix."""
    return 0 if scales.columns >= width else scales.columns


def sum_parts(parts: Tensor, each: int) -> Tensor:
    """Return the sums of each token's `each` rows of parts [T * each, H]."""
    num_tokens, width = len(parts) // each, parts.shape[1]
    out = parts.new_empty((num_tokens, width))
    grid = (num_tokens, triton.cdiv(width, _COLUMNS))
    _sum[grid](parts, out, width, EACH=each, BLOCK=_COLUMNS, num_warps=4)
    return out
