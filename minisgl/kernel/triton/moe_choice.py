"""The choice of a token's experts inside the kernels that compute the experts.

The router stores the logits, and each program of the experts chooses again. A router that chooses
takes 3 us more (Qwen3.6-35B-A3B with 1 token, on one H200): its last program waits for all others,
reads their logits and chooses alone. The programs of the experts are of one warp, because a
reduction over several warps needs shared memory and a barrier.

The order is that of moe_routing.choose: the largest value first, of equal ones the lower id.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# mypy: disable-error-code=assignment

import triton
import triton.language as tl

_NONE = tl.constexpr(-0x80000000)  # below the key of every number


@triton.jit
def ranked(logits, correction, num_experts, SIGMOID: tl.constexpr, WIDTH: tl.constexpr):
    """Return the scores [WIDTH] of a token's experts, and int32 keys in the order of the choice.

    logits: a pointer to the float32 logits of the token; NaN counts as -inf. The scores are the
    logits, or with SIGMOID their sigmoids. correction: float32 [num_experts], added to the sigmoids
    for the choice; not read without SIGMOID.
    """
    ids = tl.arange(0, WIDTH)
    inside = ids < num_experts
    logit = tl.load(logits + ids, mask=inside, other=float("-inf"))
    score = tl.where(logit == logit, logit, float("-inf"))
    value = score
    if SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
        value = score + tl.load(correction + ids, mask=inside, other=0.0)
    bits = value.to(tl.int32, bitcast=True)
    return score, tl.where(inside, bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE)


@triton.jit
def take_largest(keys):
    """Return the id of the largest key, the key, and the keys without it."""
    WIDTH: tl.constexpr = keys.shape[0]
    ids = tl.arange(0, WIDTH)
    # Two reductions of int32, each of which is one instruction of a warp. One of int64 is ten.
    largest = tl.max(keys, axis=0)
    found = tl.min(tl.where(keys == largest, ids, WIDTH), axis=0)
    return found, largest, tl.where(ids == found, _NONE, keys)


@triton.jit
def chosen_at(
    logits,
    correction,
    place,
    num_experts,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the expert at a place of the token, int32. The shared experts follow the chosen."""
    expert = num_experts + place - TOP_K
    if place < TOP_K:
        _, keys = ranked(logits, correction, num_experts, SIGMOID, WIDTH)
        for _ in range(place + 1):
            expert, _, keys = take_largest(keys)
    return expert


@triton.jit
def all_chosen(
    logits,
    correction,
    num_experts,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALE: tl.constexpr,
    RENORMALISE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return the experts of a token and their weights: two tuples of TOP_K + SHARED scalars.

    The constants are the fields of moe_routing.Rule.
    """
    score, keys = ranked(logits, correction, num_experts, SIGMOID, WIDTH)
    ids = tl.arange(0, WIDTH)
    most = tl.max(score, axis=0)
    experts, masses, total = (), (), 0.0
    for _ in tl.static_range(TOP_K):
        found, key, keys = take_largest(keys)
        if SIGMOID:
            mass = tl.sum(tl.where(ids == found, score, 0.0), axis=0)
        else:
            value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            mass = tl.exp(value - most)
        experts += (found,)
        masses += (mass,)
        total += mass
    if not RENORMALISE:
        total = 1.0 if SIGMOID else tl.sum(tl.exp(score - most), axis=0)
    weights = ()
    for j in tl.static_range(TOP_K):
        weights += (masses[j] / total * SCALE,)
    for j in tl.static_range(SHARED):
        experts += (num_experts + j,)
        share = 1.0
        if GATED:
            share = 1.0 / (1.0 + tl.exp(-tl.load(logits + num_experts)))
        weights += (share,)
    return experts, weights
