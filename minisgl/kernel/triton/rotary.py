"""Head norm, rotation and KV store between the qkv projection and attention, in one launch.

A program handles HEADS neighbouring heads of one token as two tiles [HEADS, D / 2], which are the
halves that rotate together. A program may hold queries, keys and values; the masks of the three
stores select them. Memory traffic: 2 T (Hq + 2 Hkv) D elements, and 4 D bytes of cos_sin per token.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from functools import partial

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from minisgl.kernel.triton.fp8 import exponents_of, magnitude, to_scale
from minisgl.kernel.triton.launch import Constants, Launcher
from minisgl.kernel.triton.overlap import current_device, overlaps

_TILE_ELEMENTS = 512  # of each half: 8 per thread with 64 threads


@triton.jit
def scaled(x, rstd, weight):
    """x * rstd * weight, rounded once, as the reference does."""
    return (x.to(tl.float32) * rstd * weight.to(tl.float32)).to(x.dtype)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def _qk_norm_rope_store(
    qkv,
    q_weight,
    k_weight,
    cos_sin,
    positions,
    slots,
    q_out,
    k_pool,
    v_pool,
    scales,
    qkv_stride,
    slot_stride,
    eps,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    blocks: tl.constexpr = (Q_HEADS + 2 * KV_HEADS + HEADS - 1) // HEADS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    head = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK)
    inside = cols < HALF
    is_q = head < Q_HEADS
    is_k = (head >= Q_HEADS) & (head < Q_HEADS + KV_HEADS)
    is_v = (head >= Q_HEADS + KV_HEADS) & (head < Q_HEADS + 2 * KV_HEADS)
    mask = (is_q | is_k | is_v)[:, None] & inside[None, :]
    at = head[:, None] * (2 * HALF) + cols[None, :]
    row = qkv + token * qkv_stride
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    first = tl.load(row + at, mask=mask, other=0.0)
    second = tl.load(row + at + HALF, mask=mask, other=0.0)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    cos = tl.load(cos_sin + position * (2 * HALF) + cols, mask=inside, other=0.0)
    sin = tl.load(cos_sin + position * (2 * HALF) + HALF + cols, mask=inside, other=0.0)
    value_at = (head - Q_HEADS - KV_HEADS)[:, None] * (2 * HALF) + cols[None, :]
    value_mask = is_v[:, None] & inside[None, :]
    if scales is None:
        tl.store(v_pool + slot * slot_stride + value_at, first, mask=value_mask)
        tl.store(v_pool + slot * slot_stride + value_at + HALF, second, mask=value_mask)
    else:
        value_first, value_second = first, second
    if NORM:
        a, b = first.to(tl.float32), second.to(tl.float32)
        squares = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        rstd = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        q_first = tl.load(q_weight + cols, mask=inside, other=0.0)[None, :]
        q_second = tl.load(q_weight + HALF + cols, mask=inside, other=0.0)[None, :]
        k_first = tl.load(k_weight + cols, mask=inside, other=0.0)[None, :]
        k_second = tl.load(k_weight + HALF + cols, mask=inside, other=0.0)[None, :]
        first = scaled(first, rstd, tl.where(is_q[:, None], q_first, k_first))
        second = scaled(second, rstd, tl.where(is_q[:, None], q_second, k_second))
    a, b = first.to(tl.float32), second.to(tl.float32)
    turned_first = (a * cos[None, :] - b * sin[None, :]).to(first.dtype)
    turned_second = (b * cos[None, :] + a * sin[None, :]).to(first.dtype)
    q_row = q_out + token * (Q_HEADS * 2 * HALF)
    q_mask = is_q[:, None] & inside[None, :]
    tl.store(q_row + at, turned_first, mask=q_mask)
    tl.store(q_row + at + HALF, turned_second, mask=q_mask)
    k_at = (head - Q_HEADS)[:, None] * (2 * HALF) + cols[None, :]
    k_mask = is_k[:, None] & inside[None, :]
    if scales is None:
        tl.store(k_pool + slot * slot_stride + k_at, turned_first, mask=k_mask)
        tl.store(k_pool + slot * slot_stride + k_at + HALF, turned_second, mask=k_mask)
    else:
        first = tl.where(is_v[:, None], value_first, turned_first)
        second = tl.where(is_v[:, None], value_second, turned_second)
        most = tl.maximum(tl.max(magnitude(first), axis=1), tl.max(magnitude(second), axis=1))
        exponents, inverse = exponents_of(most)
        first = (first.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
        second = (second.to(tl.float32) * inverse[:, None]).to(tl.float8e4nv)
        tl.store(k_pool + slot * slot_stride + k_at, first, mask=k_mask)
        tl.store(k_pool + slot * slot_stride + k_at + HALF, second, mask=k_mask)
        tl.store(v_pool + slot * slot_stride + value_at, first, mask=value_mask)
        tl.store(v_pool + slot * slot_stride + value_at + HALF, second, mask=value_mask)
        kv_head = tl.where(is_v, head - KV_HEADS, head) - Q_HEADS
        scale_at = (slot // PAGE * KV_HEADS + kv_head) * PAGE + slot % PAGE
        scale_at = scales + scale_at * 2 + is_v.to(tl.int32)
        tl.store(scale_at, to_scale(exponents), mask=is_k | is_v)


_launcher = Launcher(_qk_norm_rope_store, current_device)


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
    scales: Tensor | None = None,
) -> Tensor:
    """As the reference. The pools' pages must be contiguous; the rows of qkv may be strided."""
    tokens = qkv.shape[0]
    q_out = qkv.new_empty((tokens, q_heads, head_dim))
    if tokens == 0:
        return q_out
    normed = q_weight is not None and k_weight is not None
    norms = (q_weight, k_weight) if normed else (qkv, qkv)
    variant = q_heads, kv_heads, head_dim, normed, k_pool.shape[1]
    heads, _ = _tile(head_dim)
    _launcher(
        (-(-(q_heads + 2 * kv_heads) // heads) * tokens,),
        (qkv, *norms, cos_sin, positions, slots, q_out, k_pool, v_pool, scales),
        (qkv.stride(0), k_pool.stride(1)),
        (eps,),
        variant,
        partial(_constants, *variant),
    )
    return q_out


def _tile(head_dim: int) -> tuple[int, int]:
    """Return the number of heads for each program, and head_dim / 2 rounded up to a power of 2."""
    block = 1 << (head_dim // 2 - 1).bit_length()
    return max(_TILE_ELEMENTS // block, 1), block


def _constants(
    q_heads: int, kv_heads: int, head_dim: int, normed: bool, page_size: int
) -> Constants:
    heads, block = _tile(head_dim)
    overlap = overlaps()
    values = {
        "Q_HEADS": q_heads,
        "KV_HEADS": kv_heads,
        "HALF": head_dim // 2,
        "NORM": normed,
        "HEADS": heads,
        "BLOCK": block,
        "PAGE": page_size,
        "OVERLAP": overlap,
    }
    return Constants(values, {"num_warps": 2, "launch_pdl": overlap})
