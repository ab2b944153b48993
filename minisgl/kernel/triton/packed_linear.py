"""x @ weight.T with 4-bit weights, and the dequantisation of such weights.

A program holds rows of the weight as the tall operand of the matrix unit and rows of x as the
narrow one. Each lane decodes its part of the weights for itself (packed.py), so that no decoded
weight passes through shared memory. While the kernel before still runs, a program prefetches its
first weights into the L2 cache. With splits over K each program stores its float32 part in a
workspace. The last program to finish a tile adds the parts in their order, so results do not change
between runs.

Bytes: N K / 2 of codes and 4 bytes for each header, for each block of rows of x; 2 M K of x per
tile of the weight (from L2); and 8 M N per split.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, float32, int32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.packed_order import OrderedWeights
from minisgl.kernel.packed_tilings import PackedTile, num_splits
from minisgl.kernel.packed_weights import PackedKind
from minisgl.kernel.triton.launch import Constants, Launcher, fill_absent
from minisgl.kernel.triton.linear import prefetch
from minisgl.kernel.triton.overlap import current_device, is_hopper, overlaps
from minisgl.kernel.triton.packed import NVFP4_FACTOR, decode_chunk, in_quads, is_fast, scale_of

_AHEAD = 4  # chunks that a program prefetches
_LEAST_ROWS = 16  # of x, for the matrix unit of Hopper


@triton.jit
def _weight_rows(tile, N, WARPS: tl.constexpr, REPEATS: tl.constexpr, GATED: tl.constexpr):
    """The rows of the weight in the order of packed.decode_chunk, and in the order of the tile.

    N: the rows of the weight. GATED: a group of 16 rows has 8 of gate and the same 8 of up.
    """
    ROWS: tl.constexpr = 16 * WARPS * REPEATS
    r = tl.arange(0, ROWS)
    group = r // (16 * WARPS) * WARPS + r // 8 % WARPS
    own = group * 16 + r // (8 * WARPS) % 2 * 8 + r % 8
    if GATED:
        first = tile * (ROWS // 2)
        loaded = tl.minimum(first + own // 16 * 8 + own % 8, N // 2 - 1) + own // 8 % 2 * (N // 2)
        row = tl.minimum(first + r // 16 * 8 + r % 8, N // 2 - 1) + r // 8 % 2 * (N // 2)
    else:
        loaded = tl.minimum(tile * ROWS + own, N - 1)
        row = tl.minimum(tile * ROWS + r, N - 1)
    return loaded, row


@triton.jit(do_not_specialize=["chunks", "splits", "num_rows"])
def _linear(
    x,
    codes,
    headers,
    row_scales,
    bias,
    out,
    parts,
    semaphores,
    N,
    K,
    x_stride,
    chunks,
    splits,
    num_rows,
    BM: tl.constexpr,
    WARPS: tl.constexpr,
    REPEATS: tl.constexpr,
    STAGES: tl.constexpr,
    HEADERS: tl.constexpr,
    NVFP4: tl.constexpr,
    FACTOR: tl.constexpr,
    SCALED_SUMS: tl.constexpr,
    WHOLE: tl.constexpr,
    SPLIT: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    AHEAD: tl.constexpr,
    QUADS: tl.constexpr,
    FAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One tile of the product, or one split of a tile. codes: int32 words.

    WHOLE: K is a multiple of 128. AHEAD: chunks that are prefetched; the tiles divide N.
    """
    ROWS: tl.constexpr = 16 * WARPS * REPEATS
    OUT: tl.constexpr = ROWS // 2 if GATED else ROWS
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, BM)  # neighbouring programs read the same weights
    tile = program // row_tiles
    m = program % row_tiles * BM + tl.arange(0, BM)
    inside = m < num_rows
    loaded, row = _weight_rows(tile, N, WARPS, REPEATS, GATED)
    steps = tl.cdiv(chunks, splits)
    begin = tl.program_id(1) * steps
    end = tl.minimum(begin + steps, chunks)
    if EARLY:
        gdc_launch_dependents()
        if AHEAD > 0:
            HALVES: tl.constexpr = 2 if GATED else 1
            flat = tl.arange(0, AHEAD * HALVES)
            chunk = tl.minimum(begin + flat // HALVES, chunks - 1).to(tl.int64)
            first = tile * OUT + flat % HALVES * (N // 2)
            prefetch(codes + (chunk * N + first) * 16, OUT * 32, AHEAD * HALVES, AHEAD * HALVES)
        gdc_wait()
    k = tl.arange(0, 128)
    word_at = codes + loaded[:, None].to(tl.int64) * 16 + tl.arange(0, 16)[None, :]
    each = tl.arange(0, HEADERS)[None, :]
    header_at = headers + loaded[:, None].to(tl.int64) * HEADERS + each
    scale_at = headers + row.to(tl.int64)
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    total = tl.zeros([ROWS, BM], tl.float32)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        at = chunk * N
        words = tl.load(word_at + at * 16)
        header = tl.load(header_at + at * HEADERS)
        if WHOLE:
            v = tl.load(x_at + chunk * 128, mask=inside[:, None], other=0.0)
        else:
            live = inside[:, None] & (k < K - chunk * 128)[None, :]
            v = tl.load(x_at + chunk * 128, mask=live, other=0.0)
        TYPE: tl.constexpr = x.dtype.element_ty
        w = decode_chunk(words, header, WARPS, REPEATS, NVFP4, not SCALED_SUMS, QUADS, TYPE, FAST)
        if QUADS:
            v = in_quads(v)
        if SCALED_SUMS:
            scale = scale_of(tl.load(scale_at + at))
            total += tl.dot(w, v.T, input_precision="ieee") * scale[:, None]
        else:
            total = tl.dot(w, v.T, total, input_precision="ieee")
            if FAST:
                # As in packed_blocks._product: this use makes the program wait for its products
                # before it decodes the next weights (triton-lang/triton issue 9433).
                total = tl.inline_asm_elementwise(
                    "mov.b32 $0, $1;", "=f,f", [total], dtype=tl.float32, is_pure=True, pack=1
                )
    if SPLIT:
        place = tl.arange(0, ROWS)[:, None] * BM + tl.arange(0, BM)[None, :]
        part = parts + program.to(tl.int64) * splits * (ROWS * BM) + place
        tl.store(part + tl.program_id(1) * (ROWS * BM), total)
        tl.debug_barrier()
        if tl.atomic_add(semaphores + program, 1, sem="acq_rel", scope="gpu") < splits - 1:
            return
        tl.store(semaphores + program, 0)
        total = tl.load(part, cache_modifier=".cg")
        for other in range(1, splits):
            total += tl.load(part + other * (ROWS * BM), cache_modifier=".cg")
    if NVFP4:
        total *= (tl.load(row_scales + row) * FACTOR)[:, None]
    if BIAS:
        total += tl.load(bias + row).to(tl.float32)[:, None]
    if GATED:
        pairs = tl.permute(tl.reshape(total, [ROWS // 16, 2, 8, BM]), (0, 2, 3, 1))
        gate, up = tl.split(pairs)
        total = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [OUT, BM])
    width = N // 2 if GATED else N
    n = tile * OUT + tl.arange(0, OUT)
    at = out + m[None, :].to(tl.int64) * width + n[:, None]
    mask = inside[None, :] & (n < width)[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first", "count"])
def _dequantise(
    codes,
    headers,
    row_scales,
    out,
    N,
    K,
    first,
    count,
    HEADERS: tl.constexpr,
    NVFP4: tl.constexpr,
    FACTOR: tl.constexpr,
    WARPS: tl.constexpr,
    FAST: tl.constexpr,
):
    """Write one chunk of 16 * WARPS of the `count` rows from `first` on."""
    chunk = tl.program_id(1).to(tl.int64)
    loaded, row = _weight_rows(tl.program_id(0), count, WARPS, 1, False)
    at = (chunk * N + first + loaded)[:, None]
    words = tl.load(codes + at * 16 + tl.arange(0, 16)[None, :])
    header = tl.load(headers + at * HEADERS + tl.arange(0, HEADERS)[None, :])
    w = decode_chunk(words, header, WARPS, 1, NVFP4, True, False, out.dtype.element_ty, FAST)
    if NVFP4:
        w = w.to(tl.float32) * (tl.load(row_scales + first + row) * FACTOR)[:, None]
    n = tl.program_id(0) * (16 * WARPS) + tl.arange(0, 16 * WARPS)
    k = chunk * 128 + tl.arange(0, 128)
    mask = (n < count)[:, None] & (k < K)[None, :]
    tl.store(out + n[:, None].to(tl.int64) * K + k[None, :], w.to(out.dtype.element_ty), mask=mask)


_launcher = Launcher(_linear, current_device)
_DEQUANTISE_WARPS = 4


def linear(
    x: Tensor,
    weights: OrderedWeights,
    bias: Tensor | None,
    semaphores: Tensor | None,
    tile: PackedTile,
    gated: bool = False,
    splits: int | None = None,
) -> Tensor:
    """x @ weights.T + bias, or silu_and_mul of it if `gated`: a new [M, N] or [M, N / 2].

    x: [M, K], unit stride in K, rows aligned to 16 bytes. gated: the rows of gate come first.
    semaphores: as in linear.linear; None: K is not split. splits: parts of K; None: num_splits
    chooses. No host sync; graph-capturable; the same result in every run.
    """
    num_rows, (chunks, height) = len(x), weights.codes.shape[:2]
    programs = -(-height // tile.height) * -(-num_rows // tile.rows)
    if semaphores is None:
        splits = 1
    elif splits is None:
        splits = num_splits(tile, programs, chunks)
    out = parts = x.new_empty((num_rows, height // 2 if gated else height))
    if splits > 1:
        parts = x.new_empty((programs, splits, tile.height * tile.rows), dtype=float32)
    words = weights.codes.view(int32)
    tensors = (x, words, weights.headers, *fill_absent(out, weights.row_scales, bias))
    sizes = (height, weights.columns, x.stride(0))
    variant = tile, weights.kind, weights.headers.shape[-1], splits > 1, gated, bias is not None
    constants = partial(_constants, height, weights.columns, x, *variant)
    tensors = (*tensors, out, parts, *fill_absent(out, semaphores))
    numbers = (chunks, splits, num_rows)
    _launcher((programs, splits), tensors, sizes, numbers, variant, constants)
    return out


def _constants(
    height: int,
    columns: int,
    x: Tensor,
    tile: PackedTile,
    kind: PackedKind,
    headers: int,
    split: bool,
    gated: bool,
    bias: bool,
) -> Constants:
    early, nvfp4 = overlaps(), kind is PackedKind.NVFP4
    values = {
        "BM": tile.rows,
        "WARPS": tile.warps,
        "REPEATS": tile.repeats,
        "STAGES": tile.stages,
        "HEADERS": headers,
        "NVFP4": nvfp4,
        "FACTOR": NVFP4_FACTOR,
        "SCALED_SUMS": tile.scaled_sums and headers == 1,
        "WHOLE": columns % 128 == 0,
        "SPLIT": split,
        "GATED": gated,
        "BIAS": bias,
        "AHEAD": _AHEAD if height % tile.height == 0 else 0,
        "QUADS": tile.rows < _LEAST_ROWS or not is_hopper(),
        "FAST": is_fast(x),
        "EARLY": early,
    }
    return Constants(values, {"num_warps": tile.warps, "launch_pdl": early})


def dequantise(
    weights: OrderedWeights, dtype: torch.dtype, first: int = 0, end: int | None = None
) -> Tensor:
    """Return the rows first..end of the weights as a new [rows, K] of `dtype`. None: up to N."""
    chunks, height = weights.codes.shape[:2]
    count = (height if end is None else end) - first
    out = weights.codes.new_empty((count, weights.columns), dtype=dtype)
    _dequantise[(triton.cdiv(count, 16 * _DEQUANTISE_WARPS), chunks)](
        weights.codes.view(int32),
        weights.headers,
        *fill_absent(out, weights.row_scales),
        out,
        height,
        weights.columns,
        first,
        count,
        HEADERS=weights.headers.shape[-1],
        NVFP4=weights.kind is PackedKind.NVFP4,
        FACTOR=NVFP4_FACTOR,
        WARPS=_DEQUANTISE_WARPS,
        FAST=is_fast(out),
        num_warps=_DEQUANTISE_WARPS,
    )
    return out
