"""The kernel of `linear` for more than 32 rows; the GPU's TMA unit copies its operands.

With so many rows a program reads as many bytes of x as of the weight, and loads of 16 bytes per
thread cannot keep up with the memory. Here one thread starts the TMA copy of a whole stage of both
operands. The stages are a ring of buffers in shared memory.

The kernel is written in Gluon, because plain Triton cannot start the loads of a loop before the
loop. This kernel fills its ring with weights while the kernel before still runs, and then waits
only for the rows of x. Rows of x are the tall operand of the matrix unit, so that a program writes
neighbouring elements.

Within a tile, 8 rows of gate and 8 rows of up alternate. The TMA descriptor of the weight has gate
and up as a dimension of its own, and a thread of the matrix unit holds both elements of a pair.

I1  A stage is filled again only after all warps have read it. warpgroup_mma_wait ensures that for
    the instructions of one warp, and the barrier that the compiler inserts before each copy into
    shared memory ensures it for all warps.

Gluon may change with each release of Triton. 3.6.0 and 3.7.1 were run; 3.8.0 compiles this file for
sm_90a.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.tilings import Tiling

_PAIRED = 8  # rows of gate, followed by as many of up
_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_PAIRED_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@gluon.jit
def _ask_for_weight(weight, tile, k, barrier, stage, pred, BN: gl.constexpr, GATED: gl.constexpr):
    at = [tile * (BN // 16), 0, 0, k] if GATED else [tile * BN, k]
    stage = stage.reshape(weight.block_shape)
    tma.async_copy_global_to_shared(weight, at, barrier, stage, pred=pred)


@gluon.jit
def _norm_factor(
    squares, num_squares, num_rows, row, K, eps, BM: gl.constexpr, SQUARES: gl.constexpr
):
    """The RMSNorm factor of each row of the tile, from the partial sums of its squares."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [gl.num_warps(), 1], [1, 0])
    m = row + gl.arange(0, BM, gl.SliceLayout(0, EACH))[None, :]
    s = gl.arange(0, SQUARES, gl.SliceLayout(1, EACH))[:, None]
    sums = gl.load(squares + s * num_rows + m, (m < num_rows) & (s < num_squares), 0.0)
    return gl.rsqrt(gl.sum(sums, axis=0) / K + eps)


@gluon.jit(do_not_specialize=["num_rows", "num_squares", "eps"])
def linear(
    bias,
    squares,
    out,
    out_squares,
    parts,
    semaphores,
    out_width,
    K,
    x,
    weight,
    num_rows,
    num_squares,
    eps,
    BM: gl.constexpr,
    BN: gl.constexpr,
    BK: gl.constexpr,
    SPLITS: gl.constexpr,
    STAGES: gl.constexpr,
    SQUARES: gl.constexpr,
    GATED: gl.constexpr,
    ADD: gl.constexpr,
    BIAS: gl.constexpr,
    WARPS: gl.constexpr,
    OVERLAP: gl.constexpr,
):
    """One tile of the product, or one split of a tile.

    x and weight are TMA descriptors (see `descriptors`). The other parameters are as in
    linear._linear.
    """
    OUT: gl.constexpr = BN // 2 if GATED else BN
    TALL: gl.constexpr = WARPS if 16 * WARPS <= BM else BM // 16  # warps along the rows
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [TALL, WARPS // TALL], [16, BN * TALL // WARPS, 16]
    )
    WRITTEN: gl.constexpr = gl.BlockedLayout([1, 8], [256 // OUT, OUT // 8], [WARPS, 1], [1, 0])
    BYTES: gl.constexpr = 2 * (BM + BN) * BK
    program = gl.program_id(0)
    row_tiles = (num_rows + BM - 1) // BM  # neighbouring programs read the same weights
    tile = program // row_tiles
    first_row = program % row_tiles * BM
    # The last tile is moved back to end with x, because copies of rows past the end take time.
    row = max(min(first_row, num_rows - BM), 0)
    steps = K // (BK * SPLITS)
    begin = gl.program_id(1) * steps * BK
    weights = gl.allocate_shared_memory(weight.dtype, [STAGES, BN, BK], x.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, BM, BK], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    fence_async_shared()
    for i in gl.static_range(STAGES):
        barrier = full.index(i)
        mbarrier.expect(barrier, BYTES, pred=i < steps)
        k = begin + i * BK
        _ask_for_weight(weight, tile, k, barrier, weights.index(i), i < steps, BN, GATED)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    for i in gl.static_range(STAGES):
        at = [row, begin + i * BK]
        tma.async_copy_global_to_shared(x, at, full.index(i), rows.index(i), pred=i < steps)
    m = row + gl.arange(0, BM, gl.SliceLayout(1, WRITTEN))
    is_own = (m >= first_row) & (m < num_rows)
    inside = is_own[:, None]
    column = tile * OUT + gl.arange(0, OUT, gl.SliceLayout(0, WRITTEN))
    out_at = out + m[:, None] * out_width + column[None, :]
    if SQUARES > 1:
        factor = _norm_factor(squares, num_squares, num_rows, row, K, eps, BM, SQUARES)
        factor = gl.convert_layout(factor, gl.SliceLayout(1, PRODUCT))
    if ADD:
        carried = gl.load(out_at, inside, 0.0)
    total = gl.zeros([BM, BN], gl.float32, PRODUCT)
    for step in range(steps):
        now = step % STAGES
        mbarrier.wait(full.index(now), step // STAGES & 1)
        w = weights.index(now).permute([1, 0])
        total = warpgroup_mma(rows.index(now), w, total, is_async=True)
        total = warpgroup_mma_wait(1, deps=(total,))  # the step before has now read its stage
        more = step - 1 + STAGES
        if (step > 0) & (more < steps):
            stage = more % STAGES
            barrier = full.index(stage)
            k = begin + more * BK
            mbarrier.expect(barrier, BYTES)
            _ask_for_weight(weight, tile, k, barrier, weights.index(stage), True, BN, GATED)
            tma.async_copy_global_to_shared(x, [row, k], barrier, rows.index(stage))
    total = warpgroup_mma_wait(0, deps=(total,))
    r = gl.arange(0, BN, gl.SliceLayout(0, PRODUCT))
    if SPLITS > 1:
        p = gl.arange(0, BM, gl.SliceLayout(1, PRODUCT))
        part = parts + program * (SPLITS * BM * BN) + p[:, None] * BN + r[None, :]
        gl.store(part + gl.program_id(1) * (BM * BN), total)
        tl.debug_barrier()
        if gl.atomic_add(semaphores + program, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        gl.store(semaphores + program, 0)
        total = gl.load(part, cache_modifier=".cg")
        for other in gl.static_range(1, SPLITS):
            total += gl.load(part + other * (BM * BN), cache_modifier=".cg")
    if SQUARES > 1:
        total *= factor[:, None]
    if BIAS:
        n = tile * OUT + r
        if GATED:
            n = tile * OUT + r // 16 * 8 + r % 8 + r // 8 % 2 * out_width
        total += gl.load(bias + n).to(gl.float32)[None, :]
    if GATED:
        pairs = gl.permute(gl.reshape(total, [BM, BN // 16, 2, 8]), (0, 1, 3, 2))
        gate, up = gl.split(pairs)
        total = gl.reshape(gate / (1.0 + gl.exp(-gate)) * up, [BM, OUT])
    total = gl.convert_layout(total, WRITTEN)
    if ADD:
        total += carried.to(gl.float32)
    rounded = total.to(out.dtype.element_ty)
    gl.store(out_at, rounded, inside)
    if ADD:
        wide = rounded.to(gl.float32)
        gl.store(out_squares + tile * num_rows + m, gl.sum(wide * wide, axis=1), is_own)
    mbarrier.invalidate(full.index(0))  # keeps the barriers' shared memory reserved until here


def descriptors(
    x: Tensor, weight: Tensor, tiling: Tiling, gated: bool
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Return the TMA descriptors of x and of the weight.

    x: [M, K], unit stride in K, rows aligned to 16 bytes. weight: contiguous [N, K].
    """
    height, width = weight.shape
    tall, columns = tiling.height, tiling.columns
    block = [tiling.rows, columns]
    rows = TensorDescriptor(x, [*x.shape], [x.stride(0), 1], block, _LAYOUT)
    if not gated:
        shape, strides, block = [height, width], [width, 1], [tall, columns]
        return rows, TensorDescriptor(weight, shape, strides, block, _LAYOUT)
    shape = [height // (2 * _PAIRED), 2, _PAIRED, width]
    strides = [_PAIRED * width, height // 2 * width, width, 1]
    block = [tall // (2 * _PAIRED), 2, _PAIRED, columns]
    return rows, TensorDescriptor(weight, shape, strides, block, _PAIRED_LAYOUT)
