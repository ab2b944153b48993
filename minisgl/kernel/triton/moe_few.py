"""The experts of a mixture of experts for a few tokens, as matrix-vector products.

moe_router.py has the router, which is the first of three launches.

The experts of one token are small. There are many small programs, and each loads all of its weights
at once, so that the whole GPU still reads at the same time. When two tokens share an expert, the
second token's programs read its weights from the L2 cache. With EARLY (Hopper and later) a kernel
uses programmatic dependent launch (overlap.py): it may load weights before gdc_wait.

Bytes read in 16-bit types: 2 H E for the router, or 2 H (E + 1) with the gate of shared experts,
and 6 H I for each of T * A assignments, where A = top_k + shared.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.activation import Activation
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.triton.elementwise import activated
from minisgl.kernel.triton.moe_router import route_few
from minisgl.kernel.triton.moe_routing import Layer, Router
from minisgl.kernel.triton.overlap import overlaps

# The weights of a program. _gate_up: rows of gate, as many rows of up, and columns of one load.
# _down: rows over all experts of a token, and columns of one load. They are the fastest of 22
# choices for _gate_up and of 31 for _down, on one H200 with H 2048 and I 768, 2026-11-21.
_ROWS, _COLUMNS = 2, 2048
_DOWN_ROWS, _DOWN_COLUMNS = 16, 256


@triton.jit
def _gate_up(
    x,
    weight,
    out,
    experts,
    inner,
    width,
    x_stride,
    EACH: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of the activation for one assignment. EACH: experts of a token."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()  # after gdc_wait, so `_down` may read the routing at once
    assignment = tl.program_id(1)
    expert = tl.load(experts + assignment).to(tl.int64)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < inner
    gate_at = weight + (expert * PRODUCTS * inner + n[:, None]) * width
    up_at = gate_at + (PRODUCTS - 1) * inner * width
    x_at = x + (assignment // EACH) * x_stride
    gate = tl.zeros([ROWS], tl.float32)
    up = tl.zeros([ROWS], tl.float32)
    for start in range(0, width, BLOCK):
        k = start + tl.arange(0, BLOCK)
        mask = inside[:, None] & (k < width)[None, :]
        if PRODUCTS == 2:
            g = tl.load(gate_at + k[None, :], mask=mask, other=0.0)
        u = tl.load(up_at + k[None, :], mask=mask, other=0.0)
        v = tl.load(x_at + k, mask=k < width, other=0.0).to(tl.float32)[None, :]
        if PRODUCTS == 2:
            gate += tl.sum(g.to(tl.float32) * v, axis=1)
        up += tl.sum(u.to(tl.float32) * v, axis=1)
    value = activated(gate, up, ACTIVATION)
    tl.store(out + assignment * inner + n, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _down(
    hidden,
    weight,
    out,
    experts,
    weights,
    width,
    inner,
    num_experts,
    TOP_K: tl.constexpr,
    SHARED: tl.constexpr,
    PLACES: tl.constexpr,
    SHARED_PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Rows of the sum of a token's experts. ADD: they are added to `out`.

    The shared experts have a tile of their own: with TOP_K + 1 experts in one tile, nearly half of
    a tile of a power of two would be idle.
    """
    token = tl.program_id(1)
    j = tl.arange(0, PLACES)
    kept = j < TOP_K
    assignment = token * (TOP_K + SHARED) + j
    expert = tl.load(experts + assignment, mask=kept, other=0).to(tl.int64)
    scale = tl.load(weights + assignment, mask=kept, other=0.0)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = n < width
    if ADD:
        carried = tl.load(out + token * width + n, mask=inside, other=0.0)
    rows = expert[:, None] * width + n[None, :]
    read = kept[:, None] & inside[None, :]
    total = tl.zeros([PLACES, ROWS], tl.float32)
    if SHARED > 0:
        i = tl.arange(0, SHARED_PLACES)
        is_shared = i < SHARED
        shared_assignment = token * (TOP_K + SHARED) + TOP_K + i
        shared_rows = (num_experts + i).to(tl.int64)[:, None] * width + n[None, :]
        shared_read = is_shared[:, None] & inside[None, :]
        shared_total = tl.zeros([SHARED_PLACES, ROWS], tl.float32)
    for start in range(0, inner, BLOCK):
        k = start + tl.arange(0, BLOCK)
        live = k < inner
        at = weight + rows[:, :, None] * inner + k[None, None, :]
        w = tl.load(at, mask=read[:, :, None] & live[None, None, :], other=0.0)
        if SHARED > 0:
            at = weight + shared_rows[:, :, None] * inner + k[None, None, :]
            shared_w = tl.load(at, mask=shared_read[:, :, None] & live[None, None, :], other=0.0)
        if EARLY:
            gdc_wait()
        at = hidden + assignment[:, None] * inner + k[None, :]
        v = tl.load(at, mask=kept[:, None] & live[None, :], other=0.0)
        total += tl.sum(w.to(tl.float32) * v.to(tl.float32)[:, None, :], axis=2)
        if SHARED > 0:
            at = hidden + shared_assignment[:, None] * inner + k[None, :]
            v = tl.load(at, mask=is_shared[:, None] & live[None, :], other=0.0)
            shared_total += tl.sum(shared_w.to(tl.float32) * v.to(tl.float32)[:, None, :], axis=2)
    value = tl.sum(total * scale[:, None], axis=0)
    if SHARED > 0:
        scale = tl.load(weights + shared_assignment, mask=is_shared, other=0.0)
        value += tl.sum(shared_total * scale[:, None], axis=0)
    if ADD:
        value += carried.to(tl.float32)
    tl.store(out + token * width + n, value.to(out.dtype.element_ty), mask=inside)


def takes(x: Tensor, layer: Layer) -> bool:
    """Whether `experts_of_few` supports the experts: those without biases."""
    return isinstance(layer[2], Activation)


def experts_of_few(
    x: Tensor,
    router: Router,
    layer: Layer,
    semaphores: Tensor,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
) -> Tensor:
    """As MoeBackend.forward, in three launches. No host sync; the same result in every run.

    x: [T, H], unit stride in H. layer: of unquantised experts that `takes` accepts. semaphores:
    int32 [T] or more, zeros before the first call; each call leaves zeros. Calls that share them
    must be on one stream.
    norm: None, or the norm before the experts, with the weight norm_weight [H]. x is then
    contiguous, and the router has no input of its own. The result is the sum of x, the norm's
    addend and the output of the experts. Without an addend, it has the memory of x. The squares are
    not used.
    """
    num_tokens, width = x.shape
    (gate_up, _, _), (down, _, _), activation = layer
    assert isinstance(activation, Activation), "biased experts; this is a bug"
    inner, top_k, shared = down.shape[2], router[2], router[4]
    num_experts = len(down) - shared
    early = overlaps()
    places = triton.next_power_of_2(top_k)
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    routed = route_few(x, router, num_experts, semaphores, norm, norm_weight)
    weights, experts, x, residual = routed
    hidden = x.new_empty((experts.numel(), inner))
    _gate_up[(triton.cdiv(inner, _ROWS), experts.numel())](
        x,
        gate_up,
        hidden,
        experts,
        inner,
        width,
        x.stride(0),
        EACH=top_k + shared,
        ACTIVATION=activation.value,
        PRODUCTS=activation.products,
        ROWS=_ROWS,
        BLOCK=columns,
        EARLY=early,
        num_warps=2,
        launch_pdl=early,
    )
    rows = max(_DOWN_ROWS // places, 1)
    out = routed.out()
    _down[(triton.cdiv(width, rows), num_tokens)](
        hidden,
        down,
        out,
        experts,
        weights,
        width,
        inner,
        num_experts,
        TOP_K=top_k,
        SHARED=shared,
        PLACES=places,
        SHARED_PLACES=triton.next_power_of_2(shared) if shared else 0,
        ROWS=rows,
        BLOCK=min(triton.next_power_of_2(inner), _DOWN_COLUMNS),
        ADD=residual is not None,
        EARLY=early,
        num_warps=4,
        maxnreg=64,  # 8 programs on a multiprocessor: all of the first token's at the same time
        launch_pdl=early,
    )
    return out
