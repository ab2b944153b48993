"""Torch references of the layers' kernels: norms, sums, activation, rotation, embedding.

Each function fixes the signature and the meaning that its GPU kernel must have. They run on any
device and in any float dtype; reductions are in float32. Nothing here synchronises with the host.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class PendingNorm(NamedTuple):
    """An RMSNorm, without weight, that is still to be applied to some x [T, H].

    squares: float32 [parts, T], which add up to the sum of squares of each row; None: not known.
    """

    eps: float
    squares: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Scale x by the inverse root mean square of its last dimension, then by `weight`.

    x: [..., H]; weight: [H], the dtype of x; None: ones. Returns a new [..., H] of x's dtype.
    Source: Zhang and Sennrich 2019; squared and averaged in float32, rounded before `weight`.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return wide.to(x.dtype) if weight is None else wide.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (rms_norm(x + residual), x + residual).

    x, residual: [T, H] of one dtype. Both are given up by the caller: a kernel may write in place.
    """
    total = x + residual
    return rms_norm(total, weight, eps), total


def add_linear(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """residual + x @ weight.T + bias, rounded once without a bias; residual is overwritten.

    residual: [T, N]; x: [T, K]; weight: [N, K]; bias: [N]. Returns residual and its squares, as in
    PendingNorm, if they came about.
    """
    residual.addmm_(x, weight.t())
    return (residual if bias is None else residual.add_(bias)), None


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up for x = [gate | up]. x: [..., 2I]; returns [..., I]."""
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions; the halves of a head are the rotated pairs.

    q: [T, Hq, D]; k: [T, Hkv, D]; positions: integers [T] below M; cos_sin: float32 [M, D], the
    D/2 cosines and then the D/2 sines of each position. Returns new tensors of q's and k's dtype.
    Source: Su et al. 2021, in the half-split layout of Hugging Face checkpoints.
    """
    cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)


def store_kv(k_pool: Tensor, v_pool: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    """Write this step's keys and values into one layer's pool, in place.

    k_pool, v_pool: [P, S, Hkv, D]; k, v: [T, Hkv, D] of the pool's dtype, same device.
    slots: integers [T] in [0, P * S), distinct except for padding; a slot is page * S + offset.
    """
    k_pool.flatten(0, 1)[slots] = k
    v_pool.flatten(0, 1)[slots] = v


def gather_embedding(ids: Tensor, weight: Tensor, first_id: int) -> Tensor:
    """Look up `ids` in the part of the vocabulary that this rank holds.

    ids: integers [T]; weight: [rows, H], row i is token first_id + i. Returns [T, H]; ids of
    other ranks give zeros, so that the sum over ranks is the full look-up.
    """
    local = ids - first_id
    mine = (local >= 0) & (local < weight.shape[0])
    return weight[torch.where(mine, local, 0)] * mine.unsqueeze(-1).to(weight.dtype)
