"""x @ weight.T for few rows, added to a residual or alone.

The weight is read once, split over K so that all of the chip reads. A program holds BN rows of the
weight as the tall operand of the matrix unit and BM of x as the narrow one, so few rows waste
nothing. While the kernel before it ends, it has the beginning of its weights brought into L2. With
splits > 1 each writes its float32 part to a workspace; the last to arrive at a tile adds the parts
in order, so results do not change between runs.

Bytes: 2 N K, and 8 M N for each split: small as long as M is.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from types import MappingProxyType
from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

from minisgl.kernel.triton.overlap import overlaps

_AHEAD = 256  # columns of each row of the weight that are brought into L2


@triton.jit
def _prefetch(rows, count, ROWS: tl.constexpr):
    """Bring `count` 2-byte elements at each of ROWS addresses into L2."""
    PIECES: tl.constexpr = 128 // ROWS if ROWS < 128 else 1  # so that every thread has one
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


@triton.jit(do_not_specialize=["num_rows", "splits", "ahead"])
def _linear(
    x,
    weight,
    out,
    parts,
    arrived,
    num_rows,
    N,
    K,
    x_stride,
    splits,
    ahead,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    k = tl.arange(0, BK)
    steps = tl.cdiv(K, BK * splits)
    begin = split * steps * BK
    weight_row = weight + n.to(tl.int64) * K + begin
    if OVERLAP:
        gdc_launch_dependents()
        _prefetch(weight_row, ahead, BN)
        gdc_wait()
    weight_at = weight_row[:, None] + k[None, :]
    x_at = x + m[None, :] * x_stride + (begin + k)[:, None]
    total = tl.zeros([BN, BM], tl.float32)
    for step in tl.range(0, tl.minimum(steps, tl.cdiv(K - begin, BK)), num_stages=STAGES):
        w = tl.load(weight_at + step * BK, eviction_policy="evict_first")
        v = tl.load(x_at + step * BK, mask=(m < num_rows)[None, :], other=0.0)
        total = tl.dot(w, v, total)
    out_at = out + m[None, :] * N + n[:, None]
    mask = (m < num_rows)[None, :] & (n < N)[:, None]
    if splits == 1:
        if ADD:
            total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
    else:
        part_at = parts + m[None, :] * N + n[:, None]
        tl.store(part_at + split * num_rows * N, total, mask=mask)
        tl.debug_barrier()
        ticket = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == splits - 1:
            total = tl.zeros([BN, BM], tl.float32)
            for other in range(splits):
                total += tl.load(part_at + other * num_rows * N, mask=mask, other=0.0)
            if ADD:
                total += tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
            tl.store(out_at, total.to(out.dtype.element_ty), mask=mask)
            tl.store(arrived + tile, 0)


class Tiling(NamedTuple):
    """Rows and columns of the weight in a tile, parts of K, loads in flight."""

    rows: int
    columns: int
    splits: int
    stages: int


_DEEP = Tiling(64, 128, 1, 8)
# (N, K): up to 16, 32 and 64 rows of x; None: cuBLAS was faster, alone or in a whole step. One
# H200, 2026-11-21, torch 2.11, Triton 3.6, bf16, in CUDA graphs that alternate with a norm, over
# weights that exceed the L2 cache. Those listed take 0.4 to 8 us less than cuBLAS.
_TILINGS: Final = MappingProxyType(
    {
        (4096, 1024): (Tiling(64, 128, 2, 4),) * 2 + (None,),
        (1024, 2048): (Tiling(64, 128, 8, 2), Tiling(32, 256, 4, 4), None),
        (6144, 1024): (_DEEP, _DEEP, None),
        (1024, 3072): (Tiling(64, 128, 6, 4),) * 2 + (None,),
        (5120, 2048): (Tiling(64, 128, 1, 6),) * 2 + (None,),
        (2048, 4096): (Tiling(64, 256, 4, 3), Tiling(64, 128, 4, 4), None),
        (6144, 4096): (_DEEP, _DEEP, Tiling(64, 64, 1, 8)),
        (4096, 4096): (Tiling(64, 128, 2, 8),) * 2 + (Tiling(64, 64, 2, 8),),
        (24576, 4096): (Tiling(64, 128, 1, 3),) * 2 + (Tiling(64, 64, 1, 4),),
        (4096, 12288): (Tiling(64, 128, 2, 8),) * 2 + (Tiling(64, 128, 2, 6),),
        (7168, 5120): (_DEEP, _DEEP, Tiling(64, 128, 1, 6)),
        (5120, 5120): (Tiling(64, 256, 1, 5), _DEEP, Tiling(64, 128, 1, 6)),
        (34816, 5120): (Tiling(64, 128, 1, 3),) + (Tiling(128, 64, 1, 3),) * 2,
        (5120, 17408): (Tiling(64, 64, 2, 7), _DEEP, None),
    }
)
_ROWS: Final = (16, 32, 64)


def tiling_for(num_rows: int, out_features: int, in_features: int) -> Tiling | None:
    """The measured tiling that beats torch on this shape on Hopper, or None; None elsewhere."""
    tilings = _TILINGS.get((out_features, in_features))
    if tilings is None or not 0 < num_rows <= _ROWS[-1]:
        return None
    if driver.active.get_current_target().arch != 90:
        return None
    return tilings[sum(num_rows > rows for rows in _ROWS)]


def small_linear(
    x: Tensor, weight: Tensor, arrived: Tensor, tiling: Tiling, residual: Tensor | None = None
) -> Tensor:
    """x @ weight.T. x: [M, K], M up to 64, unit stride in K; weight: contiguous [N, K]; bf16.

    arrived: int32 [N / 32] or more, zeros before the first call and again after each; calls that
    share it must follow one another on one stream. N and K divide into the tiling's tiles.
    Returns a new [M, N], or residual, contiguous [M, N], with the product added to it. No host
    sync; graph-capturable; the same result in every run.
    """
    num_rows, width = x.shape
    height = weight.shape[0]
    out = x.new_empty((num_rows, height)) if residual is None else residual
    parts = out
    if tiling.splits > 1:
        parts = x.new_empty((tiling.splits, num_rows, height), dtype=float32)
    overlap = overlaps()
    _linear[(height // tiling.rows, tiling.splits)](
        x,
        weight,
        out,
        parts,
        arrived,
        num_rows,
        height,
        width,
        x.stride(0),
        tiling.splits,
        min(_AHEAD, width // tiling.splits),
        BM=max(triton.next_power_of_2(num_rows), 16),
        BN=tiling.rows,
        BK=tiling.columns,
        STAGES=tiling.stages,
        ADD=residual is not None,
        OVERLAP=overlap,
        num_warps=tiling.rows // 16 if tiling.rows > 64 else 4,
        launch_pdl=overlap,
    )
    return out
