"""Counter-based random numbers: a draw is a pure function of (seed, position, token id).

So the tokens of a request depend neither on the other requests of its batch nor on the device or
the rank.
Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # the round multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # the key increments: golden ratio and sqrt(3) - 1
_ROUNDS = 10
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Encrypt four 32-bit counter words under two 32-bit key words.

    All words are int64 tensors with values in [0, 2**32), of shapes that broadcast together.
    Returns four such words. Products wrap modulo 2**64, which keeps the 64 bits that are used.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = (
            _high(p1) ^ c1 ^ k0,
            p1 & _MASK,
            _high(p0) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def _high(product: Tensor) -> Tensor:
    return (product >> 32) & _MASK


def gumbel_noise(
    seeds: Tensor, positions: Tensor, count: int, *, first: Tensor | int = 0, stream: int = 0
) -> Tensor:
    """Return Gumbel(0, 1) noise for `count` ids of each row, from `first` on: float32 [N, count].

    seeds: int64 [N], any value. positions: integers [N], the position of the sampled token. first:
    one id for all rows, or integers [N] that are multiples of 4. Id v of a row takes word v % 4 of
    philox(counter = (v // 4, position, stream, 0), key = (low, high half of seed)).

    A word r becomes u = (r + 0.5) / 2**32 and then -log(-log1p(-u)). The largest noise decides an
    argmax, and comes from the smallest u. There float32 still distinguishes the 2**32 steps of r.
    """
    seeds, positions = seeds.long().unsqueeze(1), positions.long().unsqueeze(1)
    skipped = 0 if isinstance(first, Tensor) else first % 4
    quads = torch.arange((skipped + count + 3) // 4, device=seeds.device).unsqueeze(0)
    quads = quads + (first.long().unsqueeze(1) if isinstance(first, Tensor) else first) // 4
    zero = torch.zeros_like(quads)
    counter = (quads, positions, zero + stream, zero)
    words = philox4x32(counter, (seeds & _MASK, (seeds >> 32) & _MASK))
    uniform = (torch.stack(words, dim=-1).float() + 0.5) * 2.0**-32
    uniform = uniform.clamp_(max=_LARGEST_BELOW_ONE).flatten(1)[:, skipped : skipped + count]
    return -torch.log(-torch.log1p(-uniform))
