"""The kernels as the rest of minisgl calls them: plain torch for CPU tensors, Triton otherwise.

Triton is imported when the first tensor that is not on the CPU arrives, so a machine without GPUs
does not need it.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel import (
    decode,
    delta,
    drafts,
    elementwise,
    gather,
    logits,
    rotary,
    sampling,
    ssd,
    states,
    step,
)
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.tilings import FEW_ROWS, Tiling, sums_squares, tiling_for

_MOST_NORMED_LINEAR_ROWS = 16  # most rows of x for which normed_linear has a kernel

_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")


def _by_device(
    reference: Callable[Concatenate[Tensor, _Rest], _Result], module: str
) -> Callable[Concatenate[Tensor, _Rest], _Result]:
    """Return a function that chooses between a reference and its Triton kernel.

    It calls `reference` if its first tensor is on the CPU, and otherwise the function of the same
    name in minisgl.kernel.triton.`module`. The docstring of the Triton function lists the inputs
    that differ from the reference's and the tensors that it overwrites.
    """

    @wraps(reference)
    def run(first: Tensor, /, *rest: _Rest.args, **named: _Rest.kwargs) -> _Result:
        if first.is_cpu:
            return reference(first, *rest, **named)
        kernels = import_module(f"minisgl.kernel.triton.{module}")
        kernel: Callable[..., _Result] = getattr(kernels, reference.__name__)
        return kernel(first, *rest, **named)

    return run


rms_norm = _by_device(elementwise.rms_norm, "norm")
add_rms_norm = _by_device(elementwise.add_rms_norm, "norm")
silu_and_mul = _by_device(elementwise.silu_and_mul, "elementwise")
gelu_and_mul = _by_device(elementwise.gelu_and_mul, "elementwise")
multiply_sigmoid = _by_device(elementwise.multiply_sigmoid, "elementwise")
add_sinks = _by_device(elementwise.add_sinks, "elementwise")
gather_embedding = _by_device(elementwise.gather_embedding, "elementwise")
qk_norm_rope_store = _by_device(rotary.qk_norm_rope_store, "rotary")
sample = _by_device(sampling.sample, "sampling")
local_candidate = _by_device(sampling.local_candidate, "sampling")
best_candidate = _by_device(sampling.best_candidate, "sampling")
apply_token_mask = _by_device(logits.apply_token_mask, "token_mask")
stage_tokens = _by_device(step.stage_tokens, "step")
kv_metadata = _by_device(step.kv_metadata, "step")
put_tokens = _by_device(step.put_tokens, "step")
find_drafts = _by_device(drafts.find_drafts, "drafts")
accept_drafts = _by_device(drafts.accept_drafts, "drafts")
context_slots = _by_device(gather.context_slots, "gather")
gather_kv = _by_device(gather.gather_kv, "gather")
balanced_decode = _by_device(decode.decode, "decode")
gated_delta = _by_device(delta.gated_delta, "delta")
selective_scan = _by_device(ssd.selective_scan, "ssd")
gated_group_norm = _by_device(ssd.gated_group_norm, "ssd")
begin_states = _by_device(states.begin_states, "states")
copy_states = _by_device(states.copy_states, "states")


def copy_words(target: Tensor, source: Tensor) -> None:
    """Copy `source` to `target`. Both int32, contiguous, of one shape.

    Each is on the device or in pinned memory of the host, which a kernel then reads or writes. So
    the copy does not wait for transfers of other data, as it would on a copy engine. torch does not
    know that the kernel uses pinned memory: the caller keeps it until the kernel has ended. No host
    sync; graph-capturable.
    """
    if target.is_cpu and source.is_cpu:
        target.copy_(source)
        return
    from minisgl.kernel.triton import step as kernels

    kernels.copy_words(target, source)


def apply_norm(x: Tensor, norm: PendingNorm, weight: Tensor | None = None) -> Tensor:
    """Return x normalised, then multiplied by `weight`. Adds the addend to x before, in place."""
    if norm.addend is None:
        return rms_norm(x, weight, norm.eps)
    return add_rms_norm(norm.addend, x, weight, norm.eps)[0]


def is_fused(x: Tensor, norm: PendingNorm) -> bool:
    """Whether our kernels for few rows apply this norm to x [T, K] themselves."""
    return norm.squares is not None or (norm.addend is None and sums_squares(*x.shape))


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
    norm: PendingNorm | None = None,
    gated: bool = False,
) -> Tensor:
    """x @ weight.T + bias. If `norm` is given, x is normalised first.

    x: [..., K]; weight: [N, K]; bias: [N]. Returns [..., N], or silu_and_mul of it, [..., N / 2],
    if `gated`: the rows of gate then stand before those of up. A bfloat16 x of few rows runs our
    own kernel on Hopper; every other product runs torch's. Graph-capturable.

    semaphores: split-K semaphores of our kernel, int32 zeros [N / 8] or more. Two calls that may
    run at the same time need different ones. None means torch's product.
    """
    tiling = _tiling(x, weight)
    if norm is not None and (tiling is None or semaphores is None or not is_fused(x, norm)):
        x, norm = apply_norm(x, norm), None
    if tiling is not None and semaphores is not None:
        from minisgl.kernel.triton import linear as kernels

        return kernels.linear(x, weight, bias, semaphores, tiling, norm, gated)
    out = functional.linear(x, weight, bias)
    return silu_and_mul(out) if gated else out


def normed_linear(
    x: Tensor,
    weight: Tensor,
    norm: PendingNorm,
    norm_weight: Tensor,
    semaphores: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return x [T, K] after the norm, and its product with weight [N, K], [T, N].

    For weights of few rows. Few rows of x run a kernel that takes the place of the norm's. The
    squares of the norm are not used. norm_weight: [K]. semaphores: as in `linear`.
    """
    if not x.is_cpu and 0 < len(x) <= _MOST_NORMED_LINEAR_ROWS and norm.addend is None:
        from minisgl.kernel.triton import norm as kernels

        return kernels.normed_linear(x, weight, norm_weight, norm.eps)
    x = apply_norm(x, norm, norm_weight)
    return x, linear(x, weight, None, semaphores)


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See minisgl.kernel.elementwise.add_linear; semaphores are as in `linear`."""
    tiling = _tiling(x, weight)
    if tiling is not None and semaphores is not None:
        from minisgl.kernel.triton import linear as kernels

        return kernels.add_linear(residual, x, weight, bias, semaphores, tiling)
    return elementwise.add_linear(residual, x, weight, bias)


def _tiling(x: Tensor, weight: Tensor) -> Tiling | None:
    """The tiles into which our kernel cuts this product; None if torch computes the product."""
    if (
        x.is_cpu
        or x.dim() != 2
        or x.stride(1) != 1
        or not x.dtype == weight.dtype == torch.bfloat16
    ):
        return None
    tiling = tiling_for(len(x), *weight.shape)
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0  # as TMA needs it
    if tiling is None or not (aligned or tiling.rows <= FEW_ROWS):
        return None
    from minisgl.kernel.triton.overlap import is_hopper

    return tiling if is_hopper() else None
