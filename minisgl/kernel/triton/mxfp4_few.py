"""Router and experts of MXFP4 weights for a few tokens, in three launches.

The counterpart of moe_few.py for the biases and the clamped SwiGLU of gpt-oss. The experts of a
token are products with one vector. The matrix unit computes them, so that the other units have time
to decode the weights (mxfp4.py). The vector fills the 8 columns of the narrow operand. While a
program of `_down` waits for the kernel before it, the program prefetches its weights into the L2
cache.

Bytes read: 2 H E for the router, 1.6 H I for each of T * A assignments, where A = top_k + shared.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor, bfloat16, int32
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.triton.linear import prefetch
from minisgl.kernel.triton.moe_router import route_few
from minisgl.kernel.triton.moe_routing import Layer, Router
from minisgl.kernel.triton.mxfp4 import is_fast, operand, rescale_factor
from minisgl.kernel.triton.overlap import overlaps
from minisgl.kernel.triton.packed_blocks import swiglu_of

# The weights that a program loads at once: 16 rows. A lane makes _CHUNKS loads of 32 weights for a
# row. A row has _SPLITS parts, and each part has a warp of its own. The stages are the loads in
# flight. These are the fastest of 4 choices for 1, 2 and 4 tokens, on one H200 with the shapes
# of gpt-oss-20b, 2026-11-23.
_CHUNKS, _SPLITS = 2, 2
_GATE_UP_STAGES, _DOWN_STAGES = 3, 4
_MOST_WARPS = 16  # of `_down`, unless a token has more experts


@triton.jit
def _total(
    weight,
    scales,
    rows,
    x,
    first_x,
    x_stride,
    columns,
    chunks,
    height,
    COUNT: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Products of 16 rows of the weight with a vector, for each of WARPS warps: [WARPS, 16].

    Warp w computes part w % SPLITS of the product at place w // SPLITS. The places from COUNT on
    repeat place COUNT - 1. weight: int32 words of experts with `chunks` chunks of `height` rows.
    rows: the row of each load in the first chunk of its expert, in the order of mxfp4.operand.
    The vector of a place is the row first_x + place of x, which has `columns` columns.
    scales: uint8, 4 for a row and chunk.
    """
    SIZE: tl.constexpr = rows.shape[0]
    STEP: tl.constexpr = CHUNKS * SPLITS  # chunks of a row
    WARPS: tl.constexpr = PLACES * SPLITS
    TYPE: tl.constexpr = x.dtype.element_ty
    r = tl.arange(0, SIZE)
    # The chunk of each row of the weight, and of each column of the vectors.
    place = r // (16 * WARPS) * SPLITS + r // 8 % WARPS % SPLITS
    own = tl.arange(0, WARPS)
    column = tl.arange(0, CHUNKS * 128)
    own_place = (column // 128 * SPLITS)[None, :] + (own % SPLITS)[:, None]
    k = own_place * 128 + (column % 128)[None, :]
    own_x = first_x + tl.minimum(own // SPLITS, COUNT - 1)
    at = x + own_x[:, None] * x_stride + k
    row = rows + place * height
    word_at = weight + row[:, None] * 16 + tl.arange(0, 16)[None, :]
    scale_at = scales + row[:, None] * 4 + tl.arange(0, 4)[None, :]
    total = tl.zeros([WARPS, 16, 8], tl.float32)
    powers = tl.load(scale_at, mask=place[:, None] < chunks, other=0)
    if EARLY:
        gdc_wait()
    for step in tl.range(0, tl.cdiv(chunks, STEP), num_stages=STAGES):
        inside = place[:, None] < chunks - (step + 1) * STEP
        next_powers = tl.load(scale_at + (step + 1) * STEP * height * 4, mask=inside, other=0)
        inside = place[:, None] < chunks - step * STEP
        words = tl.load(word_at + step * STEP * height * 16, mask=inside, other=0)
        v = tl.load(at + step * (STEP * 128), mask=k < columns - step * (STEP * 128), other=0.0)
        w = operand(words, powers, CHUNKS, WARPS, TYPE, FAST)
        v = tl.permute(tl.reshape(v, [WARPS, CHUNKS, 4, 4, 2, 2, 2]), (0, 1, 3, 5, 2, 6, 4))
        powers = next_powers
        v = tl.reshape(v, [WARPS, CHUNKS * 128])
        v = tl.broadcast_to(v[:, :, None], [WARPS, CHUNKS * 128, 8])
        total = tl.dot(w, v, total, input_precision="ieee")
    return tl.max(total, axis=2)  # all columns are equal


@triton.jit
def _gate_up(
    x,
    weight,
    scales,
    bias,
    out,
    experts,
    width,
    inner,
    chunks,
    x_stride,
    alpha,
    limit,
    rescale,
    EACH: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """8 rows of the gate and the same rows of up, for one assignment. EACH: experts of a token."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # after gdc_wait, so `_down` may read the routing at once
    assignment = tl.program_id(1)
    expert = tl.load(experts + assignment).to(tl.int64)
    r = tl.arange(0, CHUNKS * 16 * SPLITS)
    n = tl.minimum(tl.program_id(0) * 8 + r % 8, inner - 1)
    rows = expert * chunks * 2 * inner + n + r // (8 * SPLITS) % 2 * inner
    total = _total(
        weight,
        scales,
        rows,
        x,
        assignment // EACH,
        x_stride,
        width,
        chunks,
        2 * inner,
        1,
        1,
        CHUNKS,
        SPLITS,
        STAGES,
        FAST,
        False,
    )
    total = tl.sum(total, axis=0) * rescale
    gate, up = tl.split(tl.permute(tl.reshape(total, [2, 8]), (1, 0)))
    n = tl.program_id(0) * 8 + tl.arange(0, 8)
    inside = n < inner
    at = bias + expert * 2 * inner + n
    gate += tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(at + inner, mask=inside, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.maximum(tl.minimum(up, limit), -limit)
    value = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    tl.store(out + assignment * inner + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    hidden,
    weight,
    scales,
    bias,
    out,
    experts,
    factors,
    width,
    inner,
    chunks,
    rescale,
    EACH: tl.constexpr,
    PLACES: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FAST: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
    PREFETCHED: tl.constexpr,
):
    """16 rows of down for the expert at each place of a token, and the sum over experts.

    ADD: the sum is added to `out`.
    Places without an expert repeat the last expert's product, which the sum leaves out.
    """
    WARPS: tl.constexpr = PLACES * SPLITS
    token = tl.program_id(1)
    r = tl.arange(0, CHUNKS * 16 * WARPS)
    place = tl.arange(0, PLACES)
    n = tl.program_id(0) * 16 + r // (8 * WARPS) % 2 * 8 + r % 8
    first = token * EACH
    own = first + tl.minimum(r // 8 % WARPS // SPLITS, EACH - 1)
    rows = tl.load(experts + own).to(tl.int64) * chunks * width + tl.minimum(n, width - 1)
    if EARLY:  # The width is a multiple of 16, so 16 rows of a chunk are always 1,024 bytes.
        flat = tl.arange(0, PLACES * PREFETCHED)
        expert = tl.load(experts + first + tl.minimum(flat // PREFETCHED, EACH - 1)).to(tl.int64)
        row = (expert * chunks + tl.minimum(flat % PREFETCHED, chunks - 1)) * width
        at = weight + (row + tl.program_id(0) * 16) * 16
        prefetch(at, 512, PLACES * PREFETCHED, PLACES * PREFETCHED)
    total = _total(
        weight,
        scales,
        rows,
        hidden,
        first,
        inner,
        inner,
        chunks,
        width,
        EACH,
        PLACES,
        CHUNKS,
        SPLITS,
        STAGES,
        FAST,
        EARLY,
    )
    total = tl.sum(tl.reshape(total, [PLACES, SPLITS, 16]), axis=1) * rescale
    n = tl.program_id(0) * 16 + tl.arange(0, 16)
    inside = n < width
    kept = place < EACH
    expert = tl.load(experts + first + place, mask=kept, other=0).to(tl.int64)
    factor = tl.load(factors + first + place, mask=kept, other=0.0)
    read = kept[:, None] & inside[None, :]
    at = bias + expert[:, None] * width + n[None, :]
    total += tl.load(at, mask=read, other=0.0).to(tl.float32)
    value = tl.sum(tl.where(read, total * factor[:, None], 0.0), axis=0)
    if ADD:
        value += tl.load(out + token * width + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=inside)


def takes(x: Tensor, layer: Layer) -> bool:
    """Whether `experts_of_few` supports x and the experts.

    x: bfloat16, and any dtype in Triton's interpreter. `_down` prefetches 16 rows at once.
    """
    is_dtype = x.dtype == bfloat16 or knobs.runtime.interpret
    return is_dtype and x.shape[1] % 16 == 0


def experts_of_few(
    x: Tensor,
    router: Router,
    layer: Layer,
    semaphores: Tensor,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """Compute a layer of experts in MXFP4, as MoeBackend.forward, in three launches.

    There is no host sync, and the result is the same in every run.

    x: [T, H] that `takes` accepts, unit stride in H. semaphores, norm and norm_weight: as in
    moe_few.experts_of_few.
    """
    (gate_up, gate_up_scales, gate_up_bias), (down, down_scales, down_bias), _ = layer
    num_tokens, width = x.shape
    early, fast, swiglu = overlaps(), is_fast(x), swiglu_of(layer)
    rescale = rescale_factor(x)
    chunks, inner = (gate_up.shape[1], down.shape[1]), gate_up.shape[2] // 2
    each = router[2] + router[4]
    num_experts = len(down) - router[4]
    routed = route_few(x, router, num_experts, semaphores, norm, norm_weight)
    weights, experts, x, residual = routed
    hidden = x.new_empty((num_tokens * each, inner))
    _gate_up[(triton.cdiv(inner, 8), num_tokens * each)](
        x,
        gate_up.view(int32),
        gate_up_scales,
        gate_up_bias,
        hidden,
        experts,
        width,
        inner,
        chunks[0],
        x.stride(0),
        *swiglu,
        rescale,
        EACH=each,
        CHUNKS=_CHUNKS,
        SPLITS=_SPLITS,
        STAGES=_GATE_UP_STAGES,
        FAST=fast,
        EARLY=early,
        num_warps=_SPLITS,
        launch_pdl=early,
    )
    places = triton.next_power_of_2(each)
    splits = min(_SPLITS, max(_MOST_WARPS // places, 1))
    out = routed.out()
    _down[(triton.cdiv(width, 16), num_tokens)](
        hidden,
        down.view(int32),
        down_scales,
        down_bias,
        out,
        experts,
        weights,
        width,
        inner,
        chunks[1],
        rescale,
        EACH=each,
        PLACES=places,
        CHUNKS=_CHUNKS,
        SPLITS=splits,
        STAGES=_DOWN_STAGES,
        FAST=fast,
        ADD=residual is not None,
        EARLY=early,
        PREFETCHED=triton.next_power_of_2(chunks[1]),
        num_warps=places * splits,
        launch_pdl=early,
    )
    return out
