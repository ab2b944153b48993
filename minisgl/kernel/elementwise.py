"""Torch references of the layers' kernels: norms, sums, activation, rotation, embedding.

Each function defines the signature and the result of its Triton kernel. The references run on any
device and in any float dtype, and reduce in float32. None of them synchronises with the host.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class PendingNorm(NamedTuple):
    """An RMSNorm without weight that a following product applies to its input x [T, H].

    squares: float32 [parts, T]. The parts of a row add up to the sum of the row's squares. None if
    no earlier kernel computed them. The product then sums them if tilings.sums_squares allows it;
    otherwise a kernel before the product applies the norm.
    addend: [T, H], which the following product first adds to x, in place. It may overwrite the
    addend. None if there is nothing to add; always None if there are squares.
    scaled: x times the weight of the norm, in x's dtype, if the product that computed x stored it.
    """

    eps: float
    squares: Tensor | None = None
    addend: Tensor | None = None
    scaled: Tensor | None = None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Divide x by the root mean square of its last dimension, then multiply by `weight`.

    x: [..., H]; weight: [H], the dtype of x; None means ones. Returns a new [..., H] of x's dtype.
    All is computed in float32, and the product is rounded once.
    Source: Zhang and Sennrich 2019.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add x to residual, in place, and return (rms_norm(residual), residual).

    x, residual: [T, H] of one dtype. The caller must not use x afterwards, since a kernel may write
    into it.
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


def add_linear(
    residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add x @ weight.T + bias to residual, in place. Without a bias the result is rounded once.

    residual: [T, N]; x: [T, K]; weight: [N, K]; bias: [N]. Returns residual and its squares, as in
    PendingNorm. The squares are None if the product did not compute them. This reference never
    computes them.
    """
    residual.addmm_(x, weight.t())
    return (residual if bias is None else residual.add_(bias)), None


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up, where gate is the first half of x and up the second.

    x: [..., 2I]. Returns [..., I].
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_and_mul(x: Tensor) -> Tensor:
    """gelu(gate) * up, as silu_and_mul. GELU is computed by its approximation with tanh.

    Source: Hendrycks and Gimpel 2016.
    """
    gate, up = x.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def multiply_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply x by sigmoid(gate), in place, and return it. x, gate: [T, n] of one dtype."""
    return x.mul_(torch.sigmoid(gate))


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Give the sink of each head its share of the softmax of attention, in place.

    A sink is one more logit without a value. It therefore divides the output of attention by
    1 + exp(sink) / (sum of the exponentials of all scores).

    out: [T, H, D], the output of attention without sinks. lse: float32 [T, H], the logarithms to
    base 2 of the sums. sinks: [H], natural logarithms.
    """
    share = 1 / (1 + torch.exp2(sinks.float() * math.log2(math.e) - lse))
    out.copy_(out.float() * share.unsqueeze(2))


def rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions (RoPE).

    Element i of a head rotates with element i + D / 2.

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


def gather_embedding(
    ids: Tensor, weight: Tensor, first_id: int, images: Tensor | None = None
) -> Tensor:
    """Look up `ids` in the part of the vocabulary that this rank holds.

    ids: integers [T]; weight: [rows, H], whose row i belongs to token first_id + i. Returns
    [T, H]. An id of another rank gives zeros, so the sum over ranks is the whole look-up.

    images: [N, H], rows need not be contiguous; id ~i, which is negative, takes row i. None: a
    negative id gives zeros.
    """
    local = ids - first_id
    mine = (local >= 0) & (local < weight.shape[0])
    found = weight[torch.where(mine, local, 0)] * mine.unsqueeze(-1).to(weight.dtype)
    if images is None:
        return found
    return torch.where((ids < 0).unsqueeze(-1), images[torch.where(ids < 0, ~ids, 0)], found)
