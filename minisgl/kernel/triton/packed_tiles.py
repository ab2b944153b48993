"""The products of packed_linear.py on Hopper, with a warp that only loads.

For int4 weights with one scale for each chunk of 128 columns. One warp starts the TMA copies of the
codes, their headers and the rows of x into a ring of buffers in shared memory, and the other warps
decode and multiply. So no multiplying warp computes addresses, and the ring is full of weights
before the kernel before has ended. Each lane decodes its own part of the tall operand, as in
packed_linear.py, and has the scales of its rows for the sums too.

With two groups of warps, each has rows of the weight of its own, and both read the same rows of x.
A tile then has so many rows of both that the L2 cache does not bound the product, and one group
decodes while the matrix units multiply for the other.

The order of the rows in a tile is that of the buffers (half, repeat, warp, eight rows). The matrix
unit gives a lane the rows i and i + 8 of a group of 16, which therefore are rows of both halves of
the tile. In a gated product these halves are gate and up.

Bytes: as in packed_linear.py. Gluon may change with each release of Triton: see linear_tiles.py.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from functools import partial
from typing import NamedTuple

from torch import Tensor, float32, int32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.packed_order import CHUNK, OrderedWeights
from minisgl.kernel.packed_tilings import PackedTile, num_splits
from minisgl.kernel.triton.launch import Constants, Launcher, fill_absent
from minisgl.kernel.triton.overlap import current_device, overlaps
from minisgl.kernel.triton.packed_parts import decode_weights, fill_ring, norm_factors, store

_X_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_CODE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=3)
_HEADER_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
_LEAST_SQUARES = 64  # sums of a row that a tile loads at once: one for each of its rows
_LOADING_REGISTERS = 24  # of the warp that loads


@gluon.jit
def _multiply(given, GROUP: gl.constexpr, VARIANT: gl.constexpr):
    """Multiply the chunks of the ring, add up the splits, and store the rows of a group."""
    BM: gl.constexpr = VARIANT[0]
    WARPS: gl.constexpr = VARIANT[1]
    REPEATS: gl.constexpr = VARIANT[2]
    STAGES: gl.constexpr = VARIANT[3]
    SCALED: gl.constexpr = VARIANT[4]
    SPLITS: gl.constexpr = VARIANT[5]
    ROWS: gl.constexpr = 16 * WARPS * REPEATS
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    buffers, barriers, outputs, place, N, num_rows, steps = given
    _, _, rows = buffers
    full, empty = barriers
    bias, out, parts, semaphores, norm, sums = outputs
    program, tile, first_row = place  # each group has a program and a tile of its own here
    program, tile = program * VARIANT[12] + GROUP, tile * VARIANT[12] + GROUP
    if VARIANT[8]:
        gdc_wait()
    total = gl.zeros([ROWS, BM], gl.float32, PRODUCT)
    zeros = gl.zeros([ROWS, BM], gl.float32, PRODUCT)
    single = 0  # the first chunk that is multiplied alone
    if VARIANT[9]:  # Two chunks at once: their decoding and their products overlap.
        single = steps // 2 * 2
        for step in range(0, single, 2):
            i, j = step % STAGES, (step + 1) % STAGES
            mbarrier.wait(full.index(i), step // STAGES & 1)
            mbarrier.wait(full.index(j), (step + 1) // STAGES & 1)
            w, s = decode_weights(buffers, i, GROUP, False, VARIANT)
            w2, s2 = decode_weights(buffers, j, GROUP, False, VARIANT)
            v, v2 = rows.index(i).permute([1, 0]), rows.index(j).permute([1, 0])
            part = warpgroup_mma(w, v, zeros, use_acc=False, is_async=True)
            part2 = warpgroup_mma(w2, v2, zeros, use_acc=False, is_async=True)
            part, part2, w, w2 = warpgroup_mma_wait(0, deps=(part, part2, w, w2))
            total += part * s[:, None]
            total += part2 * s2[:, None]
            mbarrier.arrive(empty.index(i), count=1)
            mbarrier.arrive(empty.index(j), count=1)
    for step in range(single, steps):
        i = step % STAGES
        mbarrier.wait(full.index(i), step // STAGES & 1)
        w, s = decode_weights(buffers, i, GROUP, SCALED, VARIANT)
        v = rows.index(i).permute([1, 0])
        if SCALED:
            part = warpgroup_mma(w, v, total, is_async=True)
            total, w = warpgroup_mma_wait(0, deps=(part, w))
        else:
            part = warpgroup_mma(w, v, zeros, use_acc=False, is_async=True)
            part, w = warpgroup_mma_wait(0, deps=(part, w))
            total += part * s[:, None]
        mbarrier.arrive(empty.index(i), count=1)
    is_last = True
    if SPLITS > 1:
        r = gl.arange(0, ROWS, gl.SliceLayout(1, PRODUCT))
        m = gl.arange(0, BM, gl.SliceLayout(0, PRODUCT))
        part_at = parts + program * (SPLITS * ROWS * BM) + r[:, None] * BM + m[None, :]
        gl.store(part_at + gl.program_id(1) * (ROWS * BM), total)
        gl.thread_barrier()
        ticket = gl.atomic_add(semaphores + program, 1, sem="acq_rel", scope="gpu")
        is_last = ticket == SPLITS - 1
        if is_last:
            gl.store(semaphores + program, 0)
            total = gl.load(part_at, cache_modifier=".cg")
            # As many parts at once as registers hold; without branches, so that the loads overlap.
            EACH: gl.constexpr = ROWS * BM // (32 * WARPS)  # registers of a part
            AT_ONCE: gl.constexpr = min(SPLITS - 1, max((64 if WARPS == 4 else 32) // EACH, 1))
            for group in range((SPLITS - 1) // AT_ONCE):
                part_group = part_at + (1 + group * AT_ONCE) * (ROWS * BM)
                for other in gl.static_range(AT_ONCE):
                    total += gl.load(part_group + other * (ROWS * BM), cache_modifier=".cg")
            for other in gl.static_range((SPLITS - 1) // AT_ONCE * AT_ONCE + 1, SPLITS):
                total += gl.load(part_at + other * (ROWS * BM), cache_modifier=".cg")
    if is_last:
        if VARIANT[10] > 0:
            total *= norm_factors(norm, first_row, num_rows, VARIANT)[None, :]
        store(total, bias, out, sums, tile, first_row, N, num_rows, VARIANT)


@gluon.jit
def _first_group(given, VARIANT: gl.constexpr):
    _multiply(given, 0, VARIANT)


@gluon.jit
def _second_group(given, VARIANT: gl.constexpr):
    _multiply(given, 1, VARIANT)


@gluon.jit(do_not_specialize=["chunks", "num_rows", "num_squares", "width", "eps"])
def _linear(
    bias,
    out,
    parts,
    semaphores,
    squares,
    out_squares,
    next_weight,
    scaled,
    N,
    x,
    codes,
    headers,
    chunks,
    num_rows,
    num_squares,
    width,
    eps,
    BM: gl.constexpr,
    WARPS: gl.constexpr,
    REPEATS: gl.constexpr,
    STAGES: gl.constexpr,
    SCALED: gl.constexpr,
    SPLITS: gl.constexpr,
    GATED: gl.constexpr,
    BIAS: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOADING_REGISTERS: gl.constexpr,
    PAIRS: gl.constexpr,
    EARLY: gl.constexpr,
    SQUARES: gl.constexpr,
    ADD: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """One tile of the product, or one split of a tile. x, codes, headers: TMA descriptors.

    The last program of a tile ends as packed_parts.py describes it.
    """
    ROWS: gl.constexpr = 16 * WARPS * REPEATS
    HALVES: gl.constexpr = 2 if GATED else 1
    program = gl.program_id(0)
    row_tiles = (num_rows + BM - 1) // BM  # neighbouring programs read the same weights
    tile, first_row = program // row_tiles, program % row_tiles * BM
    each = (chunks + SPLITS - 1) // SPLITS
    begin = gl.program_id(1) * each
    steps = min(each, chunks - begin)
    shape: gl.constexpr = [STAGES * GROUPS, HALVES, ROWS // HALVES, 16]
    words = gl.allocate_shared_memory(gl.int32, shape, codes.layout)
    heads = gl.allocate_shared_memory(gl.int32, shape[:3], headers.layout)
    rows = gl.allocate_shared_memory(x.dtype, [STAGES, BM, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=GROUPS)
    fence_async_shared()
    if EARLY:
        gdc_launch_dependents()
    buffers, barriers = (words, heads, rows), (full, empty)
    place = program, tile, first_row
    variant: gl.constexpr = (
        BM, WARPS, REPEATS, STAGES, SCALED, SPLITS, GATED, BIAS, EARLY, PAIRS, SQUARES, ADD, GROUPS,
    )  # fmt: skip
    norm = squares, num_squares, width, eps
    outputs = bias, out, parts, semaphores, norm, (out_squares, next_weight, scaled)
    inputs = x, codes, headers
    loading = inputs, buffers, barriers, (tile, first_row), begin, steps, variant
    given = buffers, barriers, outputs, place, N, num_rows, steps
    if GROUPS == 1:
        gl.warp_specialize(
            [(_first_group, (given, variant)), (fill_ring, loading)], [1], [LOADING_REGISTERS]
        )
    else:
        gl.warp_specialize(
            [
                (_first_group, (given, variant)),
                (_second_group, (given, variant)),
                (fill_ring, loading),
            ],
            [WARPS, 1],
            [REGISTERS, LOADING_REGISTERS],
        )


_launcher = Launcher(_linear, current_device)


def takes(weights: OrderedWeights) -> bool:
    """Whether `linear` multiplies these weights."""
    return weights.headers.shape[-1] == 1 and weights.height % 16 == 0


def linear(
    x: Tensor,
    weights: OrderedWeights,
    bias: Tensor | None,
    semaphores: Tensor | None,
    tile: PackedTile,
    gated: bool = False,
    splits: int | None = None,
    norm: PendingNorm | None = None,
) -> Tensor:
    """As packed_linear.linear, for weights that `takes` accepts.

    norm: None, or a norm with squares. x is then its `scaled`.
    """
    out = x.new_empty((len(x), weights.height // (1 + gated)))
    _launch(x, weights, bias, semaphores, tile, out, gated, splits, norm)
    return out


def add_linear(
    residual: Tensor,
    x: Tensor,
    weights: OrderedWeights,
    bias: Tensor | None,
    semaphores: Tensor | None,
    tile: PackedTile,
    next_weight: Tensor | None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Add `linear` to residual, contiguous [M, N], in place.

    Returns residual, its squares as in PendingNorm, and residual * next_weight [N] as a new tensor,
    or None.
    """
    squares = x.new_empty((-(-weights.height // tile.height), len(x)), dtype=float32)
    scaled = None if next_weight is None else x.new_empty(residual.shape)
    sums = Sums(squares, next_weight, scaled)
    _launch(x, weights, bias, semaphores, tile, residual, False, splits, sums=sums)
    return residual, squares, scaled


class Sums(NamedTuple):
    """The further results of add_linear, and the weight of the next norm."""

    squares: Tensor | None = None
    next_weight: Tensor | None = None
    scaled: Tensor | None = None


def _launch(
    x: Tensor,
    weights: OrderedWeights,
    bias: Tensor | None,
    semaphores: Tensor | None,
    tile: PackedTile,
    out: Tensor,
    gated: bool,
    splits: int | None,
    norm: PendingNorm | None = None,
    sums: Sums | None = None,
) -> None:
    num_rows, (chunks, height), halves = len(x), weights.codes.shape[:2], 1 + gated
    programs = -(-height // tile.height) * -(-num_rows // tile.rows)
    if semaphores is None:
        splits = 1
    elif splits is None:
        # Each group of warps of a tile has a semaphore.
        enough = programs * tile.groups <= len(semaphores)
        splits = num_splits(tile, programs, chunks) if enough else 1
    parts = out
    if splits > 1:
        parts = x.new_empty((programs, splits, tile.height * tile.rows), dtype=float32)
    width, tall = height // halves, tile.height // tile.groups // halves
    words = weights.codes.view(int32)
    shape, strides = [num_rows, weights.columns], [x.stride(0), 1]
    rows = TensorDescriptor(x, shape, strides, [tile.rows, CHUNK], _X_LAYOUT)
    shape, strides = [chunks * halves, width, 16], [width * 16, 16, 1]
    codes = TensorDescriptor(words, shape, strides, [halves, tall, 16], _CODE_LAYOUT)
    shape, strides = [chunks * halves, width], [width, 1]
    headers = TensorDescriptor(weights.headers, shape, strides, [halves, tall], _HEADER_LAYOUT)
    squares = None if norm is None else norm.squares
    num_squares = 0 if squares is None else len(squares)
    most = 0 if squares is None else max(1 << (num_squares - 1).bit_length(), _LEAST_SQUARES)
    sums = sums or Sums()
    add = (sums.squares is not None) + (sums.scaled is not None)
    variant = tile, splits, gated, bias is not None, most, add
    tensors = (*fill_absent(out, bias), out, parts, *fill_absent(out, semaphores, squares, *sums))
    eps = 0.0 if norm is None else norm.eps
    numbers = rows, codes, headers, chunks, num_rows, num_squares, weights.columns, eps
    constants = partial(_constants, *variant)
    _launcher((programs, splits), tensors, (height,), numbers, variant, constants)


def _constants(
    tile: PackedTile, splits: int, gated: bool, bias: bool, squares: int, add: int
) -> Constants:
    early = overlaps()
    values = {
        "BM": tile.rows,
        "WARPS": tile.warps,
        "REPEATS": tile.repeats,
        "STAGES": tile.stages,
        "SCALED": not tile.scaled_sums,
        "SPLITS": splits,
        "GATED": gated,
        "BIAS": bias,
        "REGISTERS": _group_registers(tile),
        "LOADING_REGISTERS": _LOADING_REGISTERS,
        "PAIRS": tile.pairs,
        "EARLY": early,
        "SQUARES": squares,
        "ADD": add,
        "GROUPS": tile.groups,
    }
    options = {"num_warps": tile.warps, "maxnreg": tile.registers, "launch_pdl": early}
    return Constants(values, options)


def _group_registers(tile: PackedTile) -> int:
    """Return the registers of a thread that multiplies."""
    all_warps = tile.groups * tile.warps + 4  # the warp that loads counts as four
    left = tile.registers * all_warps - 4 * _LOADING_REGISTERS
    return left // (tile.groups * tile.warps) // 8 * 8
