"""Routing of a mixture of experts: the experts of each token, and the tokens sorted by expert.

An assignment is a token with one of its experts. Its number is token * top_k + j, where j is the
rank of the expert. `align` sorts assignments into blocks, each of which belongs to one expert. The
host does not learn the number of blocks: a launch has programs for the largest possible number, and
those whose block has no expert end at once.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float32, int32

# The arguments of the kernels, as minisgl.moe.base has them. Router: weight, bias, top_k and
# renormalise. Matrix: values, scales and bias of a matrix of all experts. Layer: gate_up, down, and
# the constants of the clamped SwiGLU, which biased experts have.
Router = tuple[Tensor, Tensor | None, int, bool]
Matrix = tuple[Tensor, Any, Tensor | None]
Layer = tuple[Matrix, Matrix, tuple[float, float] | None]

_ROWS = 4
_FEW = 4096  # up to this many assignments, each program of `align` counts all of them
# What a program of `align` loads at once: rows of the table of counts, assignments to count, and
# assignments to compare with those of its chunk.
_TABLE_ROWS = tl.constexpr(32)
_LOADED = tl.constexpr(1024)
_COMPARED = tl.constexpr(32)


@triton.jit
def choose(
    value,
    inside,
    alive,
    at,
    weights,
    experts,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):
    """Choose the TOP_K experts of ROWS tokens, and store the experts and their weights.

    value   [ROWS, WIDTH]: logits.
    inside  [1, WIDTH]: whether a column belongs to an expert.
    alive   [ROWS, 1]: whether a row belongs to a token.
    at      [ROWS, 1]: number of the token's first assignment.
    """
    ids = tl.arange(0, WIDTH)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    value = tl.where(inside & (value == value), value, float("-inf"))  # NaN counts as -inf
    # Integer keys, all different, in the order of (value, then lower id first).
    bits = value.to(tl.int32, bitcast=True)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    none = -0x7FFFFFFFFFFFFFFF
    keys = tl.where(inside, (ordered << 32) | (WIDTH - 1 - ids), none)
    chosen = tl.full([ROWS, PLACES], 0, tl.int64)
    for j in tl.static_range(TOP_K):
        best = tl.max(keys, axis=1)[:, None]
        chosen = tl.where(place == j, best, chosen)
        keys = tl.where(keys == best, none, keys)
    kept = place < TOP_K
    high = (chosen >> 32).to(tl.int32)
    logit = (high ^ ((high >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    largest = tl.max(value, axis=1)[:, None]
    mass = tl.where(kept, tl.exp(logit - largest), 0.0)
    total = tl.sum(mass if RENORMALISE else tl.exp(value - largest), axis=1)[:, None]
    tl.store(weights + at + place, mass / total, mask=alive & kept)
    found = WIDTH - 1 - (chosen & 0xFFFFFFFF).to(tl.int32)
    tl.store(experts + at + place, found, mask=alive & kept)


@triton.jit(do_not_specialize=["num_tokens"])
def _route(
    logits,
    weights,
    experts,
    num_tokens,
    num_experts,
    stride,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    PLACES: tl.constexpr,
):
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    ids = tl.arange(0, WIDTH)[None, :]
    inside, alive = ids < num_experts, rows < num_tokens
    value = tl.load(logits + rows.to(tl.int64) * stride + ids, mask=alive & inside, other=0.0)
    choose(
        value.to(tl.float32),
        inside,
        alive,
        rows * TOP_K,
        weights,
        experts,
        TOP_K,
        RENORMALISE,
        ROWS,
        WIDTH,
        PLACES,
    )


def route(logits: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """As minisgl.moe.route. logits: [T, E], unit stride in E, T > 0.

    Returns weights, float32 [T, top_k], and experts, int32 [T, top_k], best first. The experts of a
    token are distinct and in range even if its logits are NaN or infinite. Of equal logits the
    lower id comes first.
    """
    num_tokens, num_experts = logits.shape
    weights = logits.new_empty((num_tokens, top_k), dtype=float32)
    experts = logits.new_empty((num_tokens, top_k), dtype=int32)
    _route[(triton.cdiv(num_tokens, _ROWS),)](
        logits,
        weights,
        experts,
        num_tokens,
        num_experts,
        logits.stride(0),
        TOP_K=top_k,
        RENORMALISE=renormalise,
        ROWS=_ROWS,
        WIDTH=triton.next_power_of_2(num_experts),
        PLACES=triton.next_power_of_2(top_k),
        num_warps=_ROWS,
    )
    return weights, experts


@triton.jit(do_not_specialize=["num_assigned"])
def _count(experts, counts, num_assigned, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Count the assignments of each expert in one chunk. counts: [chunks, WIDTH]."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_assigned
    taken = tl.load(experts + at, mask=inside, other=0)
    found = tl.histogram(taken, WIDTH, mask=inside)
    tl.store(counts + chunk * WIDTH + tl.arange(0, WIDTH), found)


@triton.jit(do_not_specialize=["num_assigned", "num_blocks"])
def _place(
    experts,
    counts,
    slots,
    owners,
    num_assigned,
    num_blocks,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Write the slots of one chunk of assignments, and this program's part of owners and padding.

    COUNTED: `counts` has the counts of all chunks. Otherwise each program counts all assignments.
    """
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    begin = chunk * CHUNK
    ids = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)  # of each expert
    before = tl.zeros([WIDTH], tl.int32)  # of each expert in earlier chunks
    if COUNTED:
        for start in range(0, chunks, _TABLE_ROWS):
            row = start + tl.arange(0, _TABLE_ROWS)[:, None]
            found = tl.load(counts + row * WIDTH + ids[None, :], mask=row < chunks, other=0)
            total += tl.sum(found, axis=0)
            before += tl.sum(tl.where(row < chunk, found, 0), axis=0)
    else:
        for start in range(0, num_assigned, _LOADED):
            at = start + tl.arange(0, _LOADED)
            inside = at < num_assigned
            taken = tl.load(experts + at, mask=inside, other=0)
            total += tl.histogram(taken, WIDTH, mask=inside)
            before += tl.histogram(taken, WIDTH, mask=at < begin)
    blocks = (total + BLOCK - 1) // BLOCK
    first_block = tl.cumsum(blocks, axis=0) - blocks
    first_slot = first_block * BLOCK

    place = tl.arange(0, CHUNK)
    inside = begin + place < num_assigned
    own = tl.load(experts + begin + place, mask=inside, other=0)
    rank = tl.zeros([CHUNK], tl.int32)  # equal experts earlier in this chunk
    for start in range(0, CHUNK, _COMPARED):
        other_place = start + tl.arange(0, _COMPARED)
        at = begin + other_place
        other = tl.load(experts + at, mask=at < num_assigned, other=-1)
        earlier = other_place[:, None] < place[None, :]
        rank += tl.sum(((other[:, None] == own[None, :]) & earlier).to(tl.int32), axis=0)
    slot = tl.gather(first_slot + before, own, 0) + rank
    tl.store(slots + slot, begin + place, mask=inside)

    for i in range(chunk, BLOCK, chunks):
        tl.store(slots + first_slot + total + i, num_assigned, mask=total + i < blocks * BLOCK)
    for i in range(chunk, tl.max(blocks, axis=0), chunks):
        tl.store(owners + first_block + i, ids, mask=i < blocks)
    for start in range(tl.sum(blocks, axis=0) + chunk * WIDTH, num_blocks, chunks * WIDTH):
        tl.store(owners + start + ids, -1, mask=start + ids < num_blocks)


class Blocks(NamedTuple):
    """Assignments sorted by expert, and by number within an expert, in B blocks of `size` slots.

    slots   int32 [B * size]: the assignment of each slot; the number of all assignments, T * top_k,
            in the unused slots at the end of a block; undefined in blocks without an owner.
    owners  int32 [B]: the expert of each block, or -1.
    """

    slots: Tensor
    owners: Tensor
    size: int


def align(experts: Tensor, num_experts: int, block: int) -> Blocks:
    """Sort assignments into blocks of `block` slots, a power of two, in one launch or two.

    The work is linear in the assignments: a program sorts one chunk of them. experts: contiguous
    int32 [T, top_k], below num_experts. No host sync; the same result in every run.
    """
    num_assigned = experts.numel()
    num_blocks = num_assigned // block + min(num_experts, num_assigned)
    slots = experts.new_empty((num_blocks * block,))
    owners = experts.new_empty((num_blocks,))
    width, counted = triton.next_power_of_2(num_experts), num_assigned > _FEW
    chunk = 512 if counted else 128
    chunks = triton.cdiv(num_assigned, chunk)
    counts = experts
    if counted:
        counts = experts.new_empty((chunks, width))
        _count[(chunks,)](experts, counts, num_assigned, WIDTH=width, CHUNK=chunk, num_warps=8)
    _place[(chunks,)](
        experts,
        counts,
        slots,
        owners,
        num_assigned,
        num_blocks,
        BLOCK=block,
        WIDTH=width,
        CHUNK=chunk,
        COUNTED=counted,
        num_warps=8,
    )
    return Blocks(slots, owners, block)
