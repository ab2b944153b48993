"""Lengths of the units of work of decode attention, and the size of its programs (decode.py)."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.decode import DecodeScratch, fewest_warps, tile_tokens
from minisgl.kernel.triton.launch import Constants
from minisgl.kernel.triton.overlap import converts_fp8, overlaps, shared_bytes

BLOCK = 16  # keys that one instruction of the matrix unit sums over
FP8_BLOCK = 32  # as many bytes as 16 keys of 16-bit elements
# Blocks that take as long as a unit's start and end (bench/notebook/2026-11-22-kernels.md).
LEAD = 7
_FEW_UNITS = 256  # up to this many units, programs have more warps
_SMALL_GROUP = 4  # query heads per KV head; larger groups make a unit's start and end long
_MOST_ELEMENTS = 2048  # the largest tile of queries, or of outputs, that fits into one warp
_MOST_SEVERAL = 1024  # as _MOST_ELEMENTS, for programs that also load the angles of each query
_MOST_WARPS = 8  # of a program
_FEW_ELEMENTS = 16  # of a thread, in a tile of queries that leaves registers for their angles
_STAGES = 5  # loads in flight; 16 KB of shared memory at head_dim 128
_LEAST = 64  # keys; short contexts use fewer programs, so that each gets about this many or more
LOG2E = 1.4426950408889634  # scores are powers of two in the kernel
REQ_FIELDS = ["rows", "start", "lengths", "first", "tokens"]  # of any alignment


@triton.jit(do_not_specialize=["num_reqs", "dummy_row"], do_not_specialize_on_alignment=REQ_FIELDS)
def _count_blocks(
    rows,
    start,
    lengths,
    first,
    tokens,
    num_reqs,
    dummy_row,
    BLOCK: tl.constexpr,
    LEAD: tl.constexpr,
    WINDOW: tl.constexpr,
    REQS: tl.constexpr,
):
    req = tl.arange(0, REQS)
    exists = req < num_reqs
    context = tl.load(start + req, mask=exists, other=0)
    context += tl.load(lengths + req, mask=exists, other=0)
    real = tl.load(rows + req, mask=exists, other=dummy_row) != dummy_row
    blocks = (context + BLOCK - 1) // BLOCK
    if WINDOW is not None:
        first_key = tl.load(start + req, mask=exists, other=0) + 1 - WINDOW
        blocks -= tl.maximum(first_key, 0) // BLOCK
    blocks = tl.where(real, blocks + LEAD, 0)
    tl.store(first + 1 + req, tl.cumsum(blocks, 0), mask=exists)
    tl.store(first, 0)
    if tokens is not None:
        counts = tl.where(real, tl.load(lengths + req, mask=exists, other=0), 0)
        tl.store(tokens + 1 + req, tl.cumsum(counts, 0), mask=exists)
        tl.store(tokens, 0)


def count_blocks(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    dummy_row: int,
    scratch: DecodeScratch,
    fp8: bool = False,
    queries: int = 1,
    window: int | None = None,
) -> None:
    """Fill scratch.first and, for several queries, scratch.tokens, once for all layers of a step.

    rows, start, lengths: int32 [N]; contexts are start + lengths. A request in row `dummy_row` is
    padding and has no blocks. fp8: whether the pool is FP8. queries, window: as in
    kernel.decode.decode. Layers with another window need another scratch.
    """
    tokens = None if queries == 1 else scratch.tokens
    counts = (rows, start, lengths, scratch.first, tokens, len(rows), dummy_row)
    block = FP8_BLOCK if fp8 else BLOCK
    constants = {"BLOCK": block, "LEAD": LEAD, "WINDOW": window, "REQS": most_reqs(scratch)}
    _count_blocks[(1,)](*counts, **constants)


def most_reqs(scratch: DecodeScratch) -> int:
    """The number of requests for which the kernels are compiled, a power of two.

    They are compiled for as many requests as the scratch allows, so that every step uses the same
    kernels.
    """
    return max(1 << (len(scratch.first) - 2).bit_length(), 256)


def program_warps(
    reqs: int, kv_heads: int, group: int, head_dim: int, fused: bool, queries: int = 1
) -> int:
    """Warps of a program. fused: the kernel normalises and rotates, as in steps without prompts."""
    if fewest_warps(head_dim) > 1:
        return fewest_warps(head_dim)
    if queries > 1:
        elements = max(1 << (group * queries - 1).bit_length(), 16) * head_dim
        return min(max(elements // _MOST_SEVERAL, 2), _MOST_WARPS)
    if fused and reqs * kv_heads <= _FEW_UNITS:
        return 4 if reqs == 1 and group > _SMALL_GROUP else 2
    query_rows = max(1 << (group + 1).bit_length(), 16)  # the queries, the new key, the new value
    return 1 if query_rows * head_dim <= _MOST_ELEMENTS else 2


def few_queries(group: int, head_dim: int, warps: int) -> bool:
    """Whether a thread holds so few elements of the tile of queries that the norms' weights and the
    angles of the whole tile fit into its registers as well.
    """
    query_rows = 1 << (group + 1).bit_length()
    return warps > 1 and query_rows * head_dim <= _FEW_ELEMENTS * 32 * warps


def _stages(rows: int, head_dim: int) -> int:
    """Loads in flight: fewer where the partial outputs of a unit do not fit into shared memory.

    The last loop of the kernel loads float32 [rows, head_dim] in each stage but the first.
    """
    return min(_STAGES, 1 + shared_bytes() // (4 * rows * head_dim + 1024))


def constants(
    kv_heads: int,
    q_heads: int,
    queries: int,
    head_dim: int,
    page_size: int,
    slot_stride: int,
    turned: bool,
    normed: bool,
    window: int | None,
    soft_cap: float | None,
    warps: int,
    fp8: bool,
    most_reqs: int,
) -> Constants:
    """The constants of the decode kernel.

    slot_stride: elements of the pool from one token to the next. fp8: whether the pool is FP8. The
    other parameters are variables of decode.decode with the same names.
    """
    block, group = FP8_BLOCK if fp8 else BLOCK, q_heads // kv_heads
    tile = tile_tokens(group, head_dim, queries)
    few = fp8 and queries == 1 and few_queries(group, head_dim, warps)
    return Constants(
        {
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "QUERIES": queries,
            "TILE": tile,
            "D": head_dim,
            "TURN": turned,
            "NORM": normed,
            "WINDOW": window,
            "CAP": None if soft_cap is None else soft_cap * LOG2E,
            "PAGE": page_size,
            "SLOT": slot_stride,
            "BLOCK": block,
            "REQS": most_reqs,
            "LEAD": LEAD,
            "LEAST": _LEAST // block,
            "STAGES": _stages(max(1 << (group * tile - 1).bit_length(), 16), head_dim),
            "FEW": few,
            "OVERLAP": overlaps(),
            "CONVERT": converts_fp8(),
        },
        {"num_warps": warps, "launch_pdl": overlaps()},
    )
