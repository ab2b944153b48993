"""The kernels as the rest of minisgl calls them: plain torch for CPU tensors, Triton otherwise.

Each function has the signature and the meaning of its reference, where its docstring names one.
Triton is imported with the first other tensor, so that machines without it never need it. Tensors
of the device meta compile kernels without running them (kernel.triton.ahead).
"""

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel import elementwise, gather, rotary, sampling, step
from minisgl.kernel.decode import DecodeScratch
from minisgl.kernel.elementwise import PendingNorm
from minisgl.kernel.sampling import SampledTokens, SamplingTensors
from minisgl.kernel.tilings import FEW_ROWS, Tiling, tiling_for


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """See minisgl.kernel.elementwise.rms_norm."""
    if not x.is_cpu:
        from minisgl.kernel.triton import norm

        return norm.rms_norm(x, weight, eps)
    return elementwise.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See minisgl.kernel.elementwise.add_rms_norm. On CUDA x and residual are overwritten."""
    if not x.is_cpu:
        from minisgl.kernel.triton import norm

        return norm.add_rms_norm(x, residual, weight, eps)
    return elementwise.add_rms_norm(x, residual, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """See minisgl.kernel.elementwise.silu_and_mul."""
    if not x.is_cpu:
        from minisgl.kernel.triton import elementwise as kernels

        return kernels.silu_and_mul(x)
    return elementwise.silu_and_mul(x)


def gather_embedding(ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """See minisgl.kernel.elementwise.gather_embedding."""
    if not weight.is_cpu:
        from minisgl.kernel.triton import elementwise as kernels

        return kernels.gather_embedding(ids, weight, first_id)
    return elementwise.gather_embedding(ids, weight, first_id)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
) -> Tensor:
    """See minisgl.kernel.rotary.qk_norm_rope_store."""
    run = rotary.qk_norm_rope_store
    if not qkv.is_cpu:
        from minisgl.kernel.triton import rotary as kernels

        run = kernels.qk_norm_rope_store
    return run(
        qkv,
        q_weight,
        k_weight,
        eps,
        cos_sin,
        positions,
        slots,
        k_pool,
        v_pool,
        q_heads,
        kv_heads,
        head_dim,
    )


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    arrived: Tensor | None = None,
    norm: PendingNorm | None = None,
) -> Tensor:
    """x @ weight.T + bias, of a normed x where norm is given.

    x: [..., K]; weight: [N, K]; bias: [N]. Returns [..., N]. Small bfloat16 steps on Hopper take a
    kernel of ours. arrived: int32 zeros [N / 8] or more, which calls in flight together must not
    share; without it torch is used. Graph-capturable.
    """
    return _linear(x, weight, bias, arrived, norm, gated=False)


def gated_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    arrived: Tensor | None = None,
    norm: PendingNorm | None = None,
) -> Tensor:
    """silu_and_mul of `linear`. weight: [2I, K], rows of the gate first. Returns [..., I]."""
    return _linear(x, weight, bias, arrived, norm, gated=True)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    arrived: Tensor | None,
    norm: PendingNorm | None,
    gated: bool,
) -> Tensor:
    tiling = _tiling(x, weight)
    if norm is not None and (tiling is None or arrived is None or norm.squares is None):
        x, norm = rms_norm(x, None, norm.eps), None
    if tiling is not None and arrived is not None:
        from minisgl.kernel.triton import linear as kernels

        return kernels.linear(x, weight, bias, arrived, tiling, norm, gated)
    out = functional.linear(x, weight, bias)
    return silu_and_mul(out) if gated else out


def add_linear(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    arrived: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """See minisgl.kernel.elementwise.add_linear, and `linear` for `arrived`."""
    tiling = _tiling(x, weight)
    if tiling is not None and arrived is not None:
        from minisgl.kernel.triton import linear as kernels

        return kernels.add_linear(residual, x, weight, bias, arrived, tiling)
    return elementwise.add_linear(residual, x, weight, bias)


def _tiling(x: Tensor, weight: Tensor) -> Tiling | None:
    """For a product that our kernel takes."""
    if (
        x.is_cpu
        or x.dim() != 2
        or x.stride(1) != 1
        or not x.dtype == weight.dtype == torch.bfloat16
    ):
        return None
    tiling = tiling_for(len(x), *weight.shape)
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 8 == 0  # as the copy engine needs it
    if tiling is None or not (aligned or tiling.rows <= FEW_ROWS):
        return None
    from minisgl.kernel.triton.overlap import is_hopper

    return tiling if is_hopper() else None


def sample(logits: Tensor, params: SamplingTensors) -> SampledTokens:
    """See minisgl.kernel.sampling.sample. On CUDA logits may be bfloat16 or float16 as well."""
    if not logits.is_cpu:
        from minisgl.kernel.triton import sampling as kernels

        return kernels.sample(logits, params)
    return sampling.sample(logits, params)


def best_of_part(logits: Tensor, params: SamplingTensors, first_id: int) -> Tensor:
    """See minisgl.kernel.sampling.best_of_part. On CUDA logits may be bfloat16 or float16."""
    if not logits.is_cpu:
        from minisgl.kernel.triton import sampling as kernels

        return kernels.best_of_part(logits, params, first_id)
    return sampling.best_of_part(logits, params, first_id)


def best_of_parts(offers: Tensor, params: SamplingTensors) -> SampledTokens:
    """See minisgl.kernel.sampling.best_of_parts."""
    if not offers.is_cpu:
        from minisgl.kernel.triton import sampling as kernels

        return kernels.best_of_parts(offers, params)
    return sampling.best_of_parts(offers, params)


def update_pages(
    page_table: Tensor, page_rows: Tensor, page_cols: Tensor, page_ids: Tensor
) -> None:
    """See minisgl.kernel.step.update_pages."""
    run = step.update_pages
    if not page_table.is_cpu:
        from minisgl.kernel.triton import step as kernels

        run = kernels.update_pages
    run(page_table, page_rows, page_cols, page_ids)


def stage_tokens(
    rows: Tensor,
    start: Tensor,
    first: Tensor,
    chunk_ids: Tensor,
    num_decode: int,
    page_table: Tensor,
    token_pool: Tensor,
    page_size: int,
    ids: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> None:
    """See minisgl.kernel.step.stage_tokens."""
    run = step.stage_tokens
    if not ids.is_cpu:
        from minisgl.kernel.triton import step as kernels

        run = kernels.stage_tokens
    run(
        rows,
        start,
        first,
        chunk_ids,
        num_decode,
        page_table,
        token_pool,
        page_size,
        ids,
        positions,
        slots,
    )


def kv_metadata(
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    page_size: int,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
) -> None:
    """See minisgl.kernel.step.kv_metadata."""
    run = step.kv_metadata
    if not rows.is_cpu:
        from minisgl.kernel.triton import step as kernels

        run = kernels.kv_metadata
    run(rows, start, lengths, page_table, page_size, kv_indptr, kv_indices, last_page_len)


def context_slots(
    rows: Tensor, start: Tensor, lengths: Tensor, page_table: Tensor, page_size: int, slots: Tensor
) -> None:
    """See minisgl.kernel.gather.context_slots."""
    run = gather.context_slots
    if not rows.is_cpu:
        from minisgl.kernel.triton import gather as kernels

        run = kernels.context_slots
    run(rows, start, lengths, page_table, page_size, slots)


def gather_kv(k_pool: Tensor, v_pool: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """See minisgl.kernel.gather.gather_kv."""
    run = gather.gather_kv
    if not k_pool.is_cpu:
        from minisgl.kernel.triton import gather as kernels

        run = kernels.gather_kv
    run(k_pool, v_pool, slots, keys, values)


def put_tokens(
    token_pool: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    samples: Tensor,
    tokens: Tensor,
) -> None:
    """See minisgl.kernel.step.put_tokens."""
    run = step.put_tokens
    if not token_pool.is_cpu:
        from minisgl.kernel.triton import step as kernels

        run = kernels.put_tokens
    run(token_pool, rows, start, lengths, samples, tokens)


def count_blocks(
    rows: Tensor, start: Tensor, lengths: Tensor, dummy_row: int, scratch: DecodeScratch
) -> None:
    """See minisgl.kernel.triton.decode.count_blocks. Not for CPU tensors."""
    from minisgl.kernel.triton import decode as kernels

    kernels.count_blocks(rows, start, lengths, dummy_row, scratch)


def balanced_decode(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    out: Tensor,
    page_table: Tensor,
    rows: Tensor,
    start: Tensor,
    lengths: Tensor,
    scratch: DecodeScratch,
) -> None:
    """See minisgl.kernel.decode.decode. Not for CPU tensors."""
    from minisgl.kernel.triton import decode as kernels

    norms, reqs = (q_weight, k_weight, eps, cos_sin), (rows, start, lengths)
    kernels.decode(qkv, *norms, k_pool, v_pool, out, page_table, *reqs, scratch)
