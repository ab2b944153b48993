"""Torch reference of the operations between the qkv projection and attention, in one function."""

import torch
from torch import Tensor

from minisgl.kernel.elementwise import rms_norm, rope
from minisgl.kernel.fp8 import store_kv


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
    """Normalise and rotate queries and keys, and store keys and values; return the queries.

    qkv                 [T, (Hq + 2 Hkv) D]: queries, keys and values of a token; not changed.
    q_weight, k_weight  [D] of qkv's dtype: RMSNorm of each head with `eps`; both None: no norm.
    cos_sin             float32 [M, D]: D / 2 cosines, then D / 2 sines of each position.
    positions           integers [T] below M.
    slots               integers [T] in [0, P * S), distinct except for padding.
    k_pool, v_pool      [P, S, Hkv, D]; the rows `slots` are overwritten. The dtype is qkv's, or
                        float8_e4m3fn with `scales`. With kv_heads 0, qkv has queries only, and
                        nothing is stored.
    scales              bfloat16 [P, Hkv, S, 2]: the scales of keys and of values; None: not FP8.

    Returns a new contiguous [T, Hq, D]. No host sync; graph-capturable.
    """
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, v = torch.split(heads, [q_heads, kv_heads, kv_heads], dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rope(q, k, positions, cos_sin)
    if kv_heads:
        store_kv(k_pool, v_pool, k, v, slots, scales)
    return q
