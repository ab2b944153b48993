"""Products of activations with FP8 weights, as linear layers call them.

On Hopper, our kernel multiplies up to EXACT_ROWS bfloat16 rows with FP8 weights. More rows are
quantised, with one scale for each token or for each 128 of its columns, as the scales of the
weights are; our kernel or torch computes these products (fp8_tilings.py). CPU tensors, and all
other products, run the reference: the weights are dequantised for the call.
"""

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel import fp8_weights
from minisgl.kernel.dispatch import apply_norm, is_fused, silu_and_mul
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.fp8_tilings import ALIGNED_COLUMNS, EXACT_ROWS, GROUP, fp8_tiling_for
from minisgl.kernel.fp8_weights import Scales, dequantise
from minisgl.kernel.slow import log_slow
from minisgl.kernel.tilings import Tiling


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
    gated: bool = False,
    leave_gate: bool = False,
) -> Tensor:
    """dispatch.linear with the dequantised weight. Returns a new tensor of x's dtype.

    x: [T, K], or [T, 2K], whose silu_and_mul is multiplied. weight: FP8 [N, K]; bias: [N] of x's
    dtype. If `norm` is given, x is normalised first. norm_weight: [K] of x's dtype, which
    multiplies x after the norm. semaphores and gated: as in dispatch.linear. leave_gate: gated
    products that our kernel does not compute return [T, N], for an fp8_linear that applies
    silu_and_mul.
    """
    tiling = _tiling(x, weight, scales)
    if tiling is None or semaphores is None:
        out = _by_torch(x, weight, scales, bias, norm, norm_weight)
        return silu_and_mul(out) if gated and not leave_gate else out
    from minisgl.kernel.triton import fp8_linear as kernels

    dtype = x.dtype
    x, x_scales = _operand(x, weight, scales, norm, norm_weight)
    if x_scales is not None:
        norm = norm_weight = None
    elif norm is not None and not is_fused(x, norm):
        x, norm = apply_norm(x, norm), None
    given = (x, x_scales, weight, scales, bias, semaphores, tiling, norm, norm_weight)
    return kernels.linear(*given, gated=gated, dtype=dtype)


def fp8_add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None = None,
    semaphores: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Add `fp8_linear` to residual [T, N].

    Returns (the sum, None, its squares as in PendingNorm) if our kernel adds in place, and else
    (the product, residual, None). The norm that follows then adds them: see PendingNorm.addend.
    """
    tiling = _tiling(x, weight, scales)
    if tiling is not None and semaphores is not None:
        from minisgl.kernel.triton import fp8_linear as kernels

        x, x_scales = _operand(x, weight, scales, None, None)
        given = (x, x_scales, weight, scales, bias, semaphores, tiling)
        total, squares = kernels.add_linear(residual, *given)
        return total, None, squares
    return _by_torch(x, weight, scales, bias, None, None), residual, None


def quantise_rows(
    x: Tensor,
    grouped: bool,
    norm: PendingNorm | None = None,
    norm_weight: Tensor | None = None,
    gated: bool = False,
) -> tuple[Tensor, Tensor]:
    """Quantise each row of x [T, K], or each group of 128 columns of a row if `grouped`.

    norm: if given, it comes first; its squares are not used. norm_weight: [K], which multiplies x
    then. gated: silu_and_mul of x [T, 2K] comes first. Returns FP8 [T, K] and float32 scales
    [T, groups] with unit stride in T. On a GPU both have undefined further rows, up to a multiple
    of 4.
    """
    if not x.is_cpu:
        from minisgl.kernel.triton import fp8_quantise as kernels

        return kernels.quantise_rows(x, grouped, norm, norm_weight, gated)
    if norm is not None:
        x = apply_norm(x, norm)
    if norm_weight is not None:
        x = x * norm_weight
    if gated:
        x = silu_and_mul(x)
    size = GROUP if grouped else x.shape[1]
    groups = functional.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)
    scales = fp8_weights.row_scales(groups)
    stored = fp8_weights.quantise(groups, scales).flatten(1)[:, : x.shape[1]].contiguous()
    return stored, scales.squeeze(-1).t().contiguous().t()


def _operand(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    norm: PendingNorm | None,
    norm_weight: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """The operand of our kernel, and its scales if it is quantised.

    The quantisation includes the norm or the silu_and_mul before this product.
    """
    silu_first = x.shape[1] != weight.shape[1]
    if len(x) <= EXACT_ROWS:
        return x, None
    grouped = scales.columns < weight.shape[1]
    stored, row_scales = quantise_rows(x, grouped, norm, norm_weight, silu_first)
    return stored[: len(x)], row_scales


def _by_torch(
    x: Tensor,
    weight: Tensor,
    scales: Scales,
    bias: Tensor | None,
    norm: PendingNorm | None,
    norm_weight: Tensor | None,
) -> Tensor:
    """`fp8_linear` by torch, or with the weights dequantised."""
    silu_first = x.shape[1] != weight.shape[1]
    if not _torch_multiplies(x, weight, scales):
        if not x.is_cpu:
            case = "FP8 weights of %d x %d with scales for %d x %d and activations of %s"
            log_slow(case, *weight.shape, scales.rows, scales.columns, x.dtype)
        if norm is not None:
            x = apply_norm(x, norm, norm_weight)
        elif norm_weight is not None:
            x = x * norm_weight
        x = silu_and_mul(x) if silu_first else x
        return functional.linear(x, dequantise(weight, scales, x.dtype), bias)
    grouped = scales.columns < weight.shape[1]
    stored, row_scales = quantise_rows(x, grouped, norm, norm_weight, silu_first)
    out = torch._scaled_mm(  # noqa: SLF001 (torch's documented FP8 product)
        stored,
        weight.t(),
        row_scales,
        scales.values.t(),
        # The product of blocks takes no bias.
        bias=None if grouped else bias,
        out_dtype=x.dtype,
        use_fast_accum=not grouped,
    )[: len(x)]
    return out if bias is None or not grouped else out.add_(bias)


def _tiling(x: Tensor, weight: Tensor, scales: Scales) -> Tiling | None:
    """The tiles of our kernel; None if it does not compute this product."""
    height, width = weight.shape
    if not _is_hopper_bf16(x):
        return None
    if len(x) <= EXACT_ROWS and (x.shape[1] != width or x.data_ptr() % 16 or x.stride(0) % 8):
        return None
    torch_multiplies = _torch_multiplies(x, weight, scales)
    return fp8_tiling_for(len(x), height, width, scales.columns, torch_multiplies)


def _torch_multiplies(x: Tensor, weight: Tensor, scales: Scales) -> bool:
    """Whether torch._scaled_mm computes this product."""
    height, width = weight.shape
    in_rows = scales.columns == width and scales.rows == 1
    in_blocks = scales.columns == scales.rows == GROUP and width % ALIGNED_COLUMNS == 0
    fits = (in_rows or in_blocks) and height % 16 == 0 and width % 16 == 0
    return fits and _is_hopper_bf16(x)


def _is_hopper_bf16(x: Tensor) -> bool:
    if x.is_cpu or x.dim() != 2 or x.stride(1) != 1 or x.dtype != torch.bfloat16:
        return False
    from minisgl.kernel.triton.overlap import is_hopper

    return is_hopper()
