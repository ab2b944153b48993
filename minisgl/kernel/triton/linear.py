"""x @ weight.T for few rows, fused with the operation before it (norm) or after it (sum, SiLU).

The kernel of this file is for up to 32 rows; linear_tiles.py has the kernel for more. The functions
linear and add_linear call one or the other.

The weight is read once, and split over K (split-K) so that the whole GPU reads it. A program holds
BN rows of the weight as the tall operand of the matrix unit, and all rows of x, at most BM, as the
narrow one, so that few rows waste no work. While the kernel before still runs, a program prefetches
its first weights into the L2 cache. With SPLITS > 1 each program stores its float32 part in a
workspace. The last program to finish a tile adds the parts in their order, so results do not change
between runs.

An RMSNorm of x multiplies each row by one factor, which this kernel applies to the result instead.
The factor needs the sum of the row's squares. If a product computed x, it stored these sums, one
per tile, and the caller passes them in. Otherwise, with up to SUMMED_ROWS rows, a program loads all
rows before its loop and sums their squares after it. It does not sum them in the loop, because
Triton 3.6 then compiles the loop wrongly: it gives x one buffer too few and writes into a buffer
that the matrix unit may still read.

Bytes: 2 N K of the weight, 2 M K of x per tile of the weight (from L2; 4 M K if it sums squares),
and 8 M N per split.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from functools import partial

import triton
import triton.language as tl
from torch import Tensor, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.tilings import FEW_ROWS, LOWEST_TILE, SUMMED_ROWS, Tiling
from minisgl.kernel.triton import linear_tiles
from minisgl.kernel.triton.launch import Constants, Launcher, fill_absent
from minisgl.kernel.triton.overlap import current_device, overlaps

_ROWS = tl.constexpr(SUMMED_ROWS)


@triton.jit
def prefetch(rows, count, ROWS: tl.constexpr, THREADS: tl.constexpr):
    """Prefetch `count` 2-byte elements at each of ROWS addresses into the L2 cache."""
    PIECES: tl.constexpr = THREADS // ROWS if ROWS < THREADS else 1  # one piece for each thread
    piece = tl.arange(0, PIECES)
    at = rows[:, None] + piece[None, :] * (count // PIECES)
    size = tl.zeros([ROWS, PIECES], tl.int32) + count * 2 // PIECES
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [at.to(tl.int64), size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_rows(x, x_stride, num_rows, K, SUMMED: tl.constexpr):
    """Load all SUMMED_ROWS or fewer rows of x. SUMMED: K, rounded up to a power of two."""
    row = tl.arange(0, _ROWS)[:, None]
    column = tl.arange(0, SUMMED)[None, :]
    mask = (row < num_rows) & (column < K)
    return tl.load(x + row * x_stride + column, mask=mask, other=0.0)


@triton.jit
def sum_squares(rows, m):
    """The sums of the squares of `rows`, in the places of m; 0 in all other places."""
    wide = rows.to(tl.float32)
    sums = tl.sum(wide * wide, axis=1)[:, None]
    is_own = tl.arange(0, rows.shape[0])[:, None] == m[None, :]
    return tl.sum(tl.where(is_own, sums, 0.0), axis=0)


@triton.jit(do_not_specialize=["num_rows", "num_squares", "ahead", "eps"])
def _linear(
    x,
    weight,
    bias,
    squares,
    out,
    out_squares,
    parts,
    semaphores,
    out_width,
    K,
    x_stride,
    num_rows,
    num_squares,
    ahead,
    eps,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    SQUARES: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BIAS: tl.constexpr,
    THREADS: tl.constexpr,
    SUMMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One tile of the product, or one split of a tile.

    out_width: the number of columns of out. A tile holds them as its rows. SUMMED: as in
    load_rows, if this kernel sums the squares of x; otherwise 0.

    With a single split, the operands of the norm and of the sum are loaded before the loop.
    """
    tile = tl.program_id(0)
    m = tl.arange(0, BM)
    inside = (m < num_rows)[None, :]
    r = tl.arange(0, BN)
    OUT: tl.constexpr = BN // 2 if GATED else BN
    n = tile * OUT + r
    if GATED:
        # Each output needs one row of gate and the matching row of up. The tile takes 8 rows of
        # gate and then the matching 8 rows of up, because one thread of the matrix unit then holds
        # both values of an output.
        n = tile * OUT + r // 16 * 8 + r % 8 + r // 8 % 2 * out_width
    k = tl.arange(0, BK)
    steps = K // (BK * SPLITS)
    begin = tl.program_id(1) * steps * BK
    weight_row = weight + n.to(tl.int64) * K + begin
    if OVERLAP:
        gdc_launch_dependents()
        if ahead > 0:
            prefetch(weight_row, ahead, BN, THREADS)
        gdc_wait()
    s = tl.arange(0, SQUARES)[:, None]
    square_at = squares + s * num_rows + m[None, :]
    square_mask = inside & (s < num_squares)
    column = tile * OUT + tl.arange(0, OUT)[:, None]
    out_at = out + m[None, :] * out_width + column
    if SPLITS == 1:
        if SQUARES > 1:
            sums = tl.load(square_at, mask=square_mask, other=0.0)
        if SUMMED > 0:
            whole = load_rows(x, x_stride, num_rows, K, SUMMED)
        if ADD:
            carried = tl.load(out_at, mask=inside, other=0.0)
    weight_at = weight_row[:, None] + k[None, :]
    x_at = x + m[None, :] * x_stride + (begin + k)[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, steps, num_stages=STAGES):
        w = tl.load(weight_at + step * BK, eviction_policy="evict_first")
        v = tl.load(x_at + step * BK, mask=inside, other=0.0)
        total = tl.dot(w, v, total)
    if SPLITS > 1:
        part = parts + tile * (SPLITS * BN * BM) + r[:, None] * BM + m[None, :]
        tl.store(part + tl.program_id(1) * (BN * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(semaphores + tile, 1, sem="acq_rel", scope="gpu") < SPLITS - 1:
            return
        tl.store(semaphores + tile, 0)
        total = tl.load(part, cache_modifier=".cg")
        for other in range(1, SPLITS):
            total += tl.load(part + other * (BN * BM), cache_modifier=".cg")
    if SQUARES > 1:
        if SPLITS > 1:
            sums = tl.load(square_at, mask=square_mask, other=0.0)
        total *= tl.rsqrt(tl.sum(sums, axis=0) / K + eps)[None, :]
    if SUMMED > 0:
        if SPLITS > 1:
            whole = load_rows(x, x_stride, num_rows, K, SUMMED)
        total *= tl.rsqrt(sum_squares(whole, m) / K + eps)[None, :]
    if BIAS:
        total += tl.load(bias + n).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(total, [BN // 16, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        total = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [OUT, BM])
    if ADD:
        if SPLITS > 1:
            carried = tl.load(out_at, mask=inside, other=0.0)
        total += carried.to(tl.float32)
    rounded = total.to(out.dtype.element_ty)
    tl.store(out_at, rounded, mask=inside)
    if ADD:
        wide = rounded.to(tl.float32)
        tl.store(out_squares + tile * num_rows + m, tl.sum(wide * wide, axis=0), mask=m < num_rows)


_few_launcher = Launcher(_linear, current_device)
_tiles_launcher = Launcher(linear_tiles.linear, current_device)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
    norm: PendingNorm | None,
    gated: bool,
) -> Tensor:
    """As dispatch.linear, in bfloat16.

    x: [M, K], unit stride in K, rows aligned to 16 bytes. weight: contiguous [N, K]; the tiling's
    tiles divide N and K. norm: None, or a norm that dispatch.is_fused accepts. semaphores: int32
    [N / 8] or more, zeros before the first call; each call leaves zeros. Calls that share them must
    be on one stream. No host sync; graph-capturable; the same result in every run.
    """
    out = x.new_empty((len(x), len(weight) // 2 if gated else len(weight)))
    _launch(x, weight, bias, semaphores, tiling, out, norm=norm, gated=gated)
    return out


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
) -> tuple[Tensor, Tensor]:
    """As the reference, but always returns the squares.

    residual: contiguous [M, N]. The other parameters are as in `linear`.
    """
    squares = x.new_empty((len(weight) // tiling.height, len(x)), dtype=float32)
    _launch(x, weight, bias, semaphores, tiling, residual, out_squares=squares)
    return residual, squares


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    semaphores: Tensor,
    tiling: Tiling,
    out: Tensor,
    *,
    norm: PendingNorm | None = None,
    gated: bool = False,
    out_squares: Tensor | None = None,
) -> None:
    num_rows, width = x.shape
    programs = weight.shape[0] // tiling.height * -(-num_rows // tiling.rows)
    grid, parts = (programs, tiling.splits), out
    if tiling.splits > 1:
        tile = tiling.rows * tiling.height
        parts = x.new_empty((*grid, tile), dtype=float32)
    squares = None if norm is None else norm.squares
    tensors = fill_absent(out, bias, squares, out, out_squares, parts, semaphores)
    sizes: tuple[int, ...] = (out.shape[1], width)
    eps = 0.0 if norm is None else norm.eps
    num_squares = 0 if squares is None else squares.shape[0]
    sums = squares is not None, summed(width, norm)
    variant = tiling, *sums, gated, out_squares is not None, bias is not None
    constants = partial(_constants, width, *variant)
    if tiling.rows <= FEW_ROWS:
        tensors, sizes = (x, weight, *tensors), (*sizes, x.stride(0))
        ahead = min(tiling.ahead, width // tiling.splits)
        numbers = (num_rows, num_squares, ahead, eps)
        _few_launcher(grid, tensors, sizes, numbers, variant, constants)
    else:
        operands = linear_tiles.descriptors(x, weight, tiling, gated)
        others = (*operands, num_rows, num_squares, eps)
        _tiles_launcher(grid, tensors, sizes, others, variant, constants)


def summed(width: int, norm: PendingNorm | None) -> int:
    """The constant SUMMED for K = width: not 0 if the norm comes without its sums of squares."""
    return triton.next_power_of_2(width) if norm is not None and norm.squares is None else 0


def _constants(
    width: int, tiling: Tiling, given: bool, summed: int, gated: bool, add: bool, bias: bool
) -> Constants:
    """The constants of _linear up to FEW_ROWS rows, and of linear_tiles.linear above.

    width: K. given: a norm comes with its sums of squares. The other parameters are the variant in
    _launch.
    """
    overlap = overlaps()
    own: dict[str, object] = {"WARPS": tiling.warps}
    if tiling.rows <= FEW_ROWS:
        own = {"THREADS": 32 * tiling.warps, "SUMMED": summed}
    values = {
        "BM": tiling.rows,
        "BN": tiling.height,
        "BK": tiling.columns,
        "SPLITS": tiling.splits,
        "STAGES": tiling.stages,
        "SQUARES": triton.next_power_of_2(width // LOWEST_TILE) if given else 1,
        "GATED": gated,
        "ADD": add,
        "BIAS": bias,
        **own,
        "OVERLAP": overlap,
    }
    return Constants(values, {"num_warps": tiling.warps, "launch_pdl": overlap})
