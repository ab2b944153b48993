"""The router of a mixture of experts for a few tokens: logits, and the choice in the same launch.

A program computes one logit, and the last program of a token to finish chooses its experts, unless
the programs of the experts choose for themselves (moe_choice.py). With the norm before the block,
each program normalises the row of its token, and one of them stores the normalised row for the
experts. The last kernel of the experts then adds its output to the residual stream, so no launch is
for the norm alone. With EARLY (Hopper and later), see overlap.py.

Bytes read in 16-bit types: 2 H E, or 2 H (E + 1) with the gate of shared experts.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, float32, int32
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.triton.launch import fill_absent
from minisgl.kernel.triton.moe_choice import rule_of, store_chosen
from minisgl.kernel.triton.moe_routing import Router
from minisgl.kernel.triton.norm import normalise
from minisgl.kernel.triton.overlap import overlaps

_COLUMNS = 2048  # of a warp, if the last program chooses: a choice by one warp is the fastest
_ALONE_COLUMNS = 256  # of a warp otherwise, up to 16 warps


@triton.jit(do_not_specialize=["eps"])
def _score(
    x,
    addend,
    norm_weight,
    total_out,
    normed,
    router,
    bias,
    correction,
    logits,
    semaphores,
    weights,
    experts,
    width,
    x_stride,
    addend_stride,
    eps,
    RULE: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
    NORM: tl.constexpr,
    ADDED: tl.constexpr,
    CHOOSES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one logit. If it CHOOSES, the last program of a token chooses the token's experts.

    The last row of the router is the gate of the shared experts, if they have one. NORM: x is
    normalised first, as `normalise` describes it; BLOCK then covers the width.
    """
    expert = tl.program_id(0)
    rows = tl.num_programs(0)
    token = tl.program_id(1)
    if EARLY:
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        w = tl.load(router + expert * width + k, mask=k < width, other=0.0).to(tl.float32)
        if NORM:
            scale = tl.load(norm_weight + k, mask=k < width, other=0.0)
        if EARLY:
            gdc_wait()
        v = tl.load(x + token * x_stride + k, mask=k < width, other=0.0).to(tl.float32)
        if NORM:
            v = normalise(
                v, scale, x, addend, total_out, normed, k, token, width, addend_stride, eps,
                expert == 0, ADDED,
            )  # fmt: skip
        total += w * v
    logit = tl.sum(total, axis=0)
    if BIASED:
        logit += tl.load(bias + expert).to(tl.float32)
    if not RULE.sigmoid:
        logit = logit.to(x.dtype.element_ty).to(tl.float32)
    tl.store(logits + token * rows + expert, logit)
    if not CHOOSES:
        return
    tl.debug_barrier()
    ticket = tl.atomic_add(semaphores + token, 1, sem="acq_rel", scope="gpu")
    if ticket == rows - 1:
        first = token * RULE.each
        store_chosen(logits + token * rows, correction, weights + first, experts + first, RULE)
        tl.store(semaphores + token, 0)


class Scored(NamedTuple):
    """The logits of each token, and the input of its experts.

    logits    float32 [T, E], or [T, E + 1] with the gate of the shared experts.
    x         [T, H], after the norm if there is one.
    residual  contiguous [T, H]: the sum that the norm read, to which the experts add their output,
              in place. None without a norm.
    """

    logits: Tensor
    x: Tensor
    residual: Tensor | None


class Routed(NamedTuple):
    """The experts of each token, and their input.

    weights, experts  the routing weights, float32 [T, A], and the experts, int32 [T, A].
    x, residual       as in Scored.
    """

    weights: Tensor
    experts: Tensor
    x: Tensor
    residual: Tensor | None

    def out(self) -> Tensor:
        """Return the tensor that takes the output of the experts, [T, H]."""
        return self.x.new_empty(self.x.shape) if self.residual is None else self.residual


def route_few(
    x: Tensor,
    router: Router,
    num_experts: int,
    semaphores: Tensor,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
) -> Routed:
    """Choose the experts of each token, in one launch.

    num_experts: without the shared ones. The other parameters are as in `experts_of_few`.
    """
    shape = len(x), router[2] + router[4]
    weights, experts = (x.new_empty(shape, dtype=dtype) for dtype in (float32, int32))
    scored = _launch(x, router, num_experts, norm, norm_weight, (semaphores, weights, experts))
    return Routed(weights, experts, scored.x, scored.residual)


def score_few(
    x: Tensor,
    router: Router,
    num_experts: int,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
) -> Scored:
    """As `route_few`, without the choice."""
    return _launch(x, router, num_experts, norm, norm_weight, None)


def _launch(
    x: Tensor,
    router: Router,
    num_experts: int,
    norm: PendingNorm | None,
    norm_weight: Tensor | None,
    choice: tuple[Tensor, Tensor, Tensor] | None,
) -> Scored:
    """choice: semaphores, weights and experts, or None if no program chooses."""
    weight, bias, correction = router[0], router[1], router[6]
    given = x if router[8] is None else router[8]
    rule = rule_of(router, num_experts, given.dtype)
    (num_tokens, width), rows = given.shape, num_experts + rule.gated
    early = overlaps()
    block = triton.next_power_of_2(width)
    if norm is None:
        block = min(block, 2 * _COLUMNS)
    warps = max(min(block // _ALONE_COLUMNS, 16) if choice is None else block // _COLUMNS, 1)
    addend, normed, residual = None, x, None
    if norm is not None:
        addend, normed = norm.addend, x.new_empty(x.shape)
        residual = x if addend is None else x.new_empty(x.shape)
    logits = x.new_empty((num_tokens, rows), dtype=float32)
    _score[(rows, num_tokens)](
        given,
        *fill_absent(x, addend, norm_weight, residual),
        normed,
        weight,
        weight if bias is None else bias,
        weight if correction is None else correction,
        logits,
        *(choice or (logits, logits, logits)),
        width,
        given.stride(0),
        0 if addend is None else addend.stride(0),
        0.0 if norm is None else norm.eps,
        RULE=rule,
        BLOCK=block,
        BIASED=bias is not None,
        NORM=norm is not None,
        ADDED=addend is not None,
        CHOOSES=choice is not None,
        EARLY=early,
        num_warps=warps,
        launch_pdl=early,
    )
    return Scored(logits, normed, residual)
