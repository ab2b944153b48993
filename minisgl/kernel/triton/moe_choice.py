"""The choice of a token's experts: inside the kernels that compute the experts, or in one launch.

For a few tokens, the router stores the logits. Then either its last program chooses, or each
program of the experts chooses for itself. A reduction over several warps needs shared memory and a
barrier. The programs of the experts therefore have one warp, and those of the router few
(moe_router.py). `route` is for many tokens, with one warp for each token.

The order: the largest value first, of equal ones the lower id.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# mypy: disable-error-code=assignment

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, bfloat16, float32, int32

from minisgl.kernel.triton.moe_routing import Router

_NONE = tl.constexpr(-0x80000000)  # below the key of every number
_HIGH = tl.constexpr(-0x10000)  # the high 16 bits


class Rule(NamedTuple):
    """How the experts of a token follow from its logits: a constant of the kernels.

    experts         of the router. The shared ones follow them.
    padded_experts  experts, rounded up to a power of two.
    top_k           experts that the router chooses for a token.
    shared          experts that compute every token.
    gated           whether the logit after those of the experts weighs the shared ones.
    sigmoid         whether the scores are the sigmoids of the logits.
    scale           of the weights of the chosen experts.
    renormalise     whether these weights are first divided by their sum.
    short           whether the values of the choice are bfloat16 numbers, which leave 16 bits of a
                    key free.
    """

    experts: int
    padded_experts: int
    top_k: int
    shared: int
    gated: bool
    sigmoid: bool
    scale: float
    renormalise: bool
    short: bool

    @property
    def each(self) -> int:
        """The experts of a token."""
        return self.top_k + self.shared


def rule_of(router: Router, num_experts: int, dtype: torch.dtype) -> Rule:
    """num_experts: without the shared ones. dtype: to which the logits of a softmax are rounded."""
    _, _, top_k, renormalise, shared, shared_gate, correction, scale, _ = router
    return Rule(
        num_experts,
        triton.next_power_of_2(num_experts),
        top_k,
        shared,
        gated=shared > 0 and shared_gate,
        sigmoid=correction is not None,
        scale=scale,
        renormalise=renormalise,
        short=correction is None and dtype == bfloat16,
    )


@triton.jit
def ranked(logits, correction, RULE: tl.constexpr):
    """Return the scores of a token's experts, and int32 keys in the order of the choice.

    Both are [padded_experts]. The scores are the logits, or their sigmoids. logits: a pointer to
    the logits of the token; NaN counts as -inf. correction: float32 [experts], added to the
    sigmoids for the choice; not read without sigmoids.
    """
    ids = tl.arange(0, RULE.padded_experts)
    inside = ids < RULE.experts
    logit = tl.load(logits + ids, mask=inside, other=float("-inf")).to(tl.float32)
    score = tl.where(logit == logit, logit, float("-inf"))
    value = score
    if RULE.sigmoid:
        score = 1.0 / (1.0 + tl.exp(-score))
        value = score + tl.load(correction + ids, mask=inside, other=0.0)
    keys = _flipped(value.to(tl.int32, bitcast=True))
    if RULE.short:
        keys = (keys & _HIGH) | (0xFFFF - ids)
    return score, tl.where(inside, keys, _NONE)


@triton.jit
def _flipped(bits):
    """The bits of a float32 number as an integer in the order of the numbers, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def take_largest(keys, RULE: tl.constexpr):
    """Return the id of the largest key, the key, and the keys without it."""
    ids = tl.arange(0, RULE.padded_experts)
    # A reduction of int32 is one instruction of a warp. One of int64 is ten.
    largest = tl.max(keys, axis=0)
    if RULE.short:
        found = 0xFFFF - (largest & 0xFFFF)
    else:
        found = tl.min(tl.where(keys == largest, ids, RULE.padded_experts), axis=0)
    return found, largest, tl.where(ids == found, _NONE, keys)


@triton.jit
def chosen_at(logits, correction, place, RULE: tl.constexpr):
    """Return the expert at a place of the token, int32. The shared experts follow the chosen."""
    expert = RULE.experts + place - RULE.top_k
    if place < RULE.top_k:
        _, keys = ranked(logits, correction, RULE)
        for _ in range(place + 1):
            expert, _, keys = take_largest(keys, RULE)
    return expert


@triton.jit
def all_chosen(logits, correction, RULE: tl.constexpr):
    """Return the experts of a token and their weights: two tuples of scalars."""
    TOP_K: tl.constexpr = RULE.top_k
    SHARED: tl.constexpr = RULE.shared
    score, keys = ranked(logits, correction, RULE)
    ids = tl.arange(0, RULE.padded_experts)
    most = tl.max(score, axis=0)
    experts, masses, total = (), (), 0.0
    for _ in tl.static_range(TOP_K):
        found, key, keys = take_largest(keys, RULE)
        if RULE.sigmoid:
            mass = tl.sum(tl.where(ids == found, score, 0.0), axis=0)
        else:
            bits = _flipped(key) & _HIGH if RULE.short else _flipped(key)
            mass = tl.exp(bits.to(tl.float32, bitcast=True) - most)
        experts += (found,)
        masses += (mass,)
        total += mass
    if not RULE.renormalise:
        total = 1.0 if RULE.sigmoid else tl.sum(tl.exp(score - most), axis=0)
    weights = ()
    for j in tl.static_range(TOP_K):
        weights += (masses[j] / total * RULE.scale,)
    for j in tl.static_range(SHARED):
        experts += (tl.full([], RULE.experts + j, tl.int32),)
        share = 1.0
        if RULE.gated:
            gate = tl.load(logits + RULE.experts).to(tl.float32)
            share = 1.0 / (1.0 + tl.exp(-gate))
        weights += (share,)
    return experts, weights


@triton.jit
def store_chosen(logits, correction, weights, experts, RULE: tl.constexpr):
    """Store the weights and the experts of a token, at these pointers."""
    EACH: tl.constexpr = RULE.each
    chosen, shares = all_chosen(logits, correction, RULE)
    for j in tl.static_range(EACH):
        tl.store(experts + j, chosen[j])
        tl.store(weights + j, shares[j])


@triton.jit
def _route(logits, correction, weights, experts, stride, RULE: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    first = token * RULE.each
    store_chosen(logits + token * stride, correction, weights + first, experts + first, RULE)


def route(logits: Tensor, router: Router) -> tuple[Tensor, Tensor]:
    """As minisgl.moe.base.route. logits: unit stride in their second dimension, T > 0.

    Returns weights, float32 [T, A], and experts, int32 [T, A], best first and the shared ones last.
    The experts of a token are distinct and in range even if its logits are NaN or infinite. Of
    equal logits the lower id comes first.
    """
    correction, is_gated = router[6], router[4] > 0 and router[5]
    num_tokens, num_experts = len(logits), logits.shape[1] - is_gated
    rule = rule_of(router, num_experts, logits.dtype)
    weights = logits.new_empty((num_tokens, rule.each), dtype=float32)
    experts = logits.new_empty((num_tokens, rule.each), dtype=int32)
    _route[(num_tokens,)](
        logits,
        logits if correction is None else correction,
        weights,
        experts,
        logits.stride(0),
        RULE=rule,
        num_warps=1,
    )
    return weights, experts
