"""The tokens of a mixture of experts, sorted by expert.

An assignment is a token with one of its A experts. Its number is token * A + j. The first top_k
experts of a token are those that the router chose, best first. The others are the shared experts,
which compute every token and follow the E experts of the router.

`align` sorts assignments into blocks, each of which belongs to one expert. The host does not learn
the number of blocks: a launch has programs for the largest possible number, and those whose block
has no expert end at once.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from minisgl.kernel.activation import Activation

# The arguments of the kernels, as minisgl.moe.base has them. Router: weight, bias, top_k and
# renormalise, the number of shared experts and whether they have a gate, correction, scale, and
# the input of the router, if it is not that of the experts.
# Matrix: values, scales and bias of a matrix of all experts. Layer: gate_up, down, and the
# activation, which is for biased experts the constants of the clamped SwiGLU.
Router = tuple[Tensor, Tensor | None, int, bool, int, bool, Tensor | None, float, Tensor | None]
Matrix = tuple[Tensor, Any, Tensor | None]
Layer = tuple[Matrix, Matrix, Activation | tuple[float, float]]

_FEW = 4096  # up to this many assignments, each program of `align` counts all of them
# Sizes of the loads of a program of `align`: rows of the table of counts, assignments to count, and
# assignments to compare with those of its chunk.
_TABLE_ROWS = tl.constexpr(32)
_LOADED = tl.constexpr(1024)
_COMPARED = tl.constexpr(32)


@triton.jit
def _number(routed, TOP_K: tl.constexpr, SHARED: tl.constexpr):
    """The number of an assignment from its number among those that the router chose."""
    return routed // TOP_K * (TOP_K + SHARED) + routed % TOP_K


@triton.jit(do_not_specialize=["num_tokens"])
def _count(
    experts,
    counts,
    num_tokens,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the assignments of each expert of the router in one chunk. counts: [chunks, WIDTH]."""
    chunk = tl.program_id(0)
    at = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = at < num_tokens * TOP_K
    taken = tl.load(experts + _number(at, TOP_K, SHARED), mask=inside, other=0)
    found = tl.histogram(taken, WIDTH, mask=inside)
    tl.store(counts + chunk * WIDTH + tl.arange(0, WIDTH), found)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _place(
    experts,
    counts,
    slots,
    owners,
    num_tokens,
    num_blocks,
    num_experts,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Write the slots of one chunk of assignments, and this program's part of all else.

    A chunk counts only assignments that the router chose. All else: the slots of the shared
    experts, the owners and the padding. COUNTED: `counts` has the counts of all chunks. Otherwise
    each program counts all assignments.
    """
    chunk = tl.program_id(0)
    chunks = tl.num_programs(0)
    begin = chunk * CHUNK
    place = tl.arange(0, CHUNK)
    ids = tl.arange(0, WIDTH)
    num_assigned = num_tokens * TOP_K
    unused = num_tokens * (TOP_K + SHARED)
    blocks_of_shared = tl.cdiv(num_tokens, BLOCK)  # the first blocks are theirs
    for start in range(begin, SHARED * blocks_of_shared * BLOCK, chunks * CHUNK):
        at = start + place
        token = at % (blocks_of_shared * BLOCK)
        number = token * (TOP_K + SHARED) + TOP_K + at // (blocks_of_shared * BLOCK)
        number = tl.where(token < num_tokens, number, unused)
        tl.store(slots + at, number, mask=at < SHARED * blocks_of_shared * BLOCK)
    for start in range(chunk * WIDTH, SHARED * blocks_of_shared, chunks * WIDTH):
        at = start + ids
        owner = num_experts + at // blocks_of_shared
        tl.store(owners + at, owner, mask=at < SHARED * blocks_of_shared)

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
            taken = tl.load(experts + _number(at, TOP_K, SHARED), mask=inside, other=0)
            total += tl.histogram(taken, WIDTH, mask=inside)
            before += tl.histogram(taken, WIDTH, mask=at < begin)
    blocks = (total + BLOCK - 1) // BLOCK
    first_block = SHARED * blocks_of_shared + tl.cumsum(blocks, axis=0) - blocks
    first_slot = first_block * BLOCK

    inside = begin + place < num_assigned
    numbers = _number(begin + place, TOP_K, SHARED)
    own = tl.load(experts + numbers, mask=inside, other=0)
    rank = tl.zeros([CHUNK], tl.int32)  # equal experts earlier in this chunk
    for start in range(0, CHUNK, _COMPARED):
        other_place = start + tl.arange(0, _COMPARED)
        at = begin + other_place
        other_at = experts + _number(at, TOP_K, SHARED)
        other = tl.load(other_at, mask=at < num_assigned, other=-1)
        earlier = other_place[:, None] < place[None, :]
        rank += tl.sum(((other[:, None] == own[None, :]) & earlier).to(tl.int32), axis=0)
    slot = tl.gather(first_slot + before, own, 0) + rank
    tl.store(slots + slot, numbers, mask=inside)

    for i in range(chunk, BLOCK, chunks):
        tl.store(slots + first_slot + total + i, unused, mask=total + i < blocks * BLOCK)
    for i in range(chunk, tl.max(blocks, axis=0), chunks):
        tl.store(owners + first_block + i, ids, mask=i < blocks)
    used = SHARED * blocks_of_shared + tl.sum(blocks, axis=0)
    for start in range(used + chunk * WIDTH, num_blocks, chunks * WIDTH):
        tl.store(owners + start + ids, -1, mask=start + ids < num_blocks)


class Blocks(NamedTuple):
    """Assignments sorted by expert, and by number within an expert, in B blocks of `size` slots.

    The shared experts come first.

    slots   int32 [B * size]: the assignment of each slot; the number of all assignments, T * A,
            in the unused slots at the end of a block; undefined in blocks without an owner.
    owners  int32 [B]: the expert of each block, or -1.
    """

    slots: Tensor
    owners: Tensor
    size: int


def align(experts: Tensor, num_experts: int, block: int, shared: int = 0) -> Blocks:
    """Sort assignments into blocks of `block` slots, a power of two, in one launch or two.

    The work is linear in the assignments: a program sorts one chunk of them. experts: contiguous
    int32 [T, A] from `route`. num_experts: without the shared ones. No host sync; the same result
    in every run.
    """
    num_tokens, top_k = len(experts), experts.shape[1] - shared
    num_assigned = num_tokens * top_k
    num_blocks = num_assigned // block + min(num_experts, num_assigned)
    num_blocks += shared * triton.cdiv(num_tokens, block)
    slots = experts.new_empty((num_blocks * block,))
    owners = experts.new_empty((num_blocks,))
    width, counted = triton.next_power_of_2(num_experts), num_assigned > _FEW
    chunk = 512 if counted else 128
    chunks = triton.cdiv(num_assigned, chunk)
    counts = experts
    if counted:
        counts = experts.new_empty((chunks, width))
        _count[(chunks,)](
            experts,
            counts,
            num_tokens,
            TOP_K=top_k,
            SHARED=shared,
            WIDTH=width,
            CHUNK=chunk,
            num_warps=8,
        )
    _place[(chunks,)](
        experts,
        counts,
        slots,
        owners,
        num_tokens,
        num_blocks,
        num_experts,
        TOP_K=top_k,
        SHARED=shared,
        BLOCK=block,
        WIDTH=width,
        CHUNK=chunk,
        COUNTED=counted,
        num_warps=8,
    )
    return Blocks(slots, owners, block)
