"""Gated delta nets: the memory of their layers, and the torch reference of one layer's step.

    S = e^g S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q        for each token and value head

The state S of a row stands at a boundary (states.py). The keys k, deltas d and decays g of the
tokens after the boundary are the history.

Source: Gated Delta Networks (Yang, Kautz, Hatamizadeh, 2024), as transformers computes
Qwen3-Next; the history as in ReplaySSM (Dao-AILab, 2026), with our boundaries.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from minisgl.kernel.states import StateStep

L2_EPS = 1e-6  # added to the square sum of a query or key before its root
TAPS = 4  # of the convolution; the last one weighs the token itself


class DeltaMemory(NamedTuple):
    """The memory of one layer: R rows, Hk key heads, Hv value heads, of Dk and Dv channels.

    S tokens are the boundary's grid: the page size. Position p of a ring of n entries is p mod n.

    state    float32 [R, Hv, Dk, Dv]: S of the tokens before the row's boundary. Not read while the
             boundary is 0. The entries of a row are contiguous.
    tails    [R, TAPS - 1, 2 Hk Dk + Hv Dv] of the model's dtype: the inputs of the convolution
             before the boundary. The entries of a row are contiguous. A copy of a state holds
             `state` and `tails`; the other tensors are not read after a copy is loaded.
    keys     [R, 2 S, Hk, Dk] of the model's dtype: a ring of normalised keys.
    deltas   float32 [R, S or 2 S, Hv, Dv]: a ring of deltas; 2 S if steps have drafts.
    decays   float32 [R, 2 S, Hv]: a ring of g.
    inputs   [R, 4 or 16, 2 Hk Dk + Hv Dv] of the model's dtype: a ring of the inputs of the
             convolution after the boundary, 16 if steps have drafts.
    """

    state: Tensor
    tails: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor
    inputs: Tensor

    @property
    def page_size(self) -> int:
        return self.keys.shape[1] // 2


class DeltaWeights(NamedTuple):
    """The weights of one layer beside its projections, for this rank's heads.

    conv     [2 Hk Dk + Hv Dv, TAPS] of the model's dtype: queries, keys, values.
    a_log    float32 [Hv]; dt_bias: float32 [Hv].
    """

    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor


class GatedNorm(NamedTuple):
    """The norm and the gate of a layer's output: RMSNorm of each head, times weight * silu(gate).

    weight   [Dv].
    gate     [T, Hv Dv].
    """

    weight: Tensor
    gate: Tensor
    eps: float


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    weights: DeltaWeights,
    memory: DeltaMemory,
    step: StateStep,
    norm: GatedNorm,
) -> Tensor:
    """Convolve the T tokens and run the delta rule over them. Returns [T, Hv Dv] of mixed's dtype.

    mixed    [T, 2 Hk Dk + Hv Dv]: queries, keys and values before the convolution.
    a, b     [T, Hv]: decay and write strength before their activations.
    memory   read and updated in place: S up to step.target, the history after it.
    norm     applied to the outputs of the rule, which are rounded to mixed's dtype before.

    No host sync on a GPU; graph-capturable.
    """
    out = mixed.new_empty((len(mixed), *memory.deltas.shape[2:]))
    for tokens, rows, place in requests_of(memory, step):
        x = convolve(mixed[tokens], weights.conv, None, rows, *place)
        q, k, v = split_channels(x, rows)
        q, k = (y * (y.square().sum(-1, keepdim=True) + L2_EPS).rsqrt() for y in (q, k))
        g = -weights.a_log.exp() * functional.softplus(a[tokens].float() + weights.dt_bias)
        inputs = Inputs(q * q.shape[-1] ** -0.5, k, v, g, b[tokens].float().sigmoid())
        out[tokens] = recur(inputs, rows, *place, corrects=True)
    return gated_norm(out, *norm)


def requests_of(
    memory: DeltaMemory, step: StateStep
) -> Iterator[tuple[slice, DeltaMemory, tuple[int, int, int]]]:
    """Yield each request of a step: its tokens, the memory of its row, and start, base, target."""
    for row, start, length, first, base, target in zip(
        *(x.tolist() for x in step[:6]), strict=True
    ):
        rows = DeltaMemory(*(part[row] for part in memory))
        yield slice(first, first + length), rows, (start, base, target)


class Inputs(NamedTuple):
    """n tokens after the convolution. q and k are normalised, and q is divided by the root of Dk.

    q, k: [n, Hk, Dk]. v: [n, Hv, Dv]. The reference has float32, the kernels the model's dtype.
    g, beta: float32 [n, Hv], the decay and the write strength.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def recur(
    inputs: Inputs, memory: DeltaMemory, start: int, base: int, target: int, *, corrects: bool
) -> Tensor:
    """Run the tokens of one request; returns float32 [n, Hv, Dv]. memory: the tensors of its row.

    corrects: d = beta (v - S^T k), the delta rule. False: d = beta v.
    """
    state = memory.state.clone() if base else torch.zeros_like(memory.state)
    ring, deltas_ring = memory.keys.shape[0], memory.deltas.shape[0]
    group = memory.state.shape[0] // memory.keys.shape[1]

    def write(position: int, state: Tensor) -> Tensor:
        key = memory.keys[position % ring].float().repeat_interleave(group, 0)
        decayed = state * memory.decays[position % ring].exp()[:, None, None]
        return decayed + memory.deltas[position % deltas_ring].unsqueeze(1) * key.unsqueeze(2)

    for position in range(base, start):
        state = write(position, state)
        if position + 1 == target:
            memory.state.copy_(state)
    out = torch.empty(inputs.v.shape)
    for i, (q, k, v, g, beta) in enumerate(zip(*inputs, strict=True)):
        position = start + i
        memory.keys[position % ring] = k
        memory.decays[position % ring] = g
        key = memory.keys[position % ring].float().repeat_interleave(group, 0)
        query = q.repeat_interleave(group, 0)
        if corrects:
            decayed = state * g.exp()[:, None, None]
            v = v - (decayed * key.unsqueeze(2)).sum(1)
        memory.deltas[position % deltas_ring] = beta.unsqueeze(1) * v
        state = write(position, state)
        out[i] = (state * query.unsqueeze(2)).sum(1)
        if position + 1 == target:
            memory.state.copy_(state)
    return out


def convolve(
    mixed: Tensor,
    conv: Tensor,
    bias: Tensor | None,
    memory: DeltaMemory,
    start: int,
    base: int,
    target: int,
) -> Tensor:
    """Return silu(convolution + bias) of the n tokens of one request, float32 [n, channels].

    memory: the tensors of its row. Puts `mixed` into the ring of inputs, and keeps the tails if the
    boundary moves.
    """
    ring = memory.inputs
    positions = torch.arange(start, start + len(mixed))
    before = target - torch.arange(TAPS - 1, 0, -1)
    new = mixed[(before - start).clamp(min=0)]
    tails = torch.where((before < start)[:, None], ring[before % len(ring)], new)
    before = start - torch.arange(TAPS - 1, 0, -1)
    kept = memory.tails[(before - base).clamp(1 - TAPS, -1)]
    earlier = torch.where((before < base)[:, None], kept, ring[before % len(ring)])
    earlier = torch.where((before < 0)[:, None], 0, earlier)
    window = torch.cat((earlier, mixed)).float().unfold(0, TAPS, 1)  # [n, channels, TAPS]
    total = (window * conv.float()).sum(2)
    last = slice(-len(ring), None)
    ring[positions[last] % len(ring)] = mixed[last]
    if target > base:
        memory.tails.copy_(tails)
    return functional.silu(total if bias is None else total + bias.float())


def split_channels(x: Tensor, memory: DeltaMemory) -> tuple[Tensor, Tensor, Tensor]:
    """Return the queries and keys [n, Hk, Dk] and the values [n, Hv, Dv] of x [n, channels]."""
    heads, dim = memory.keys.shape[1:]
    q, k = x[:, : 2 * heads * dim].view(len(x), 2, heads, dim).unbind(1)
    return q, k, x[:, 2 * heads * dim :].view(len(x), *memory.deltas.shape[1:])


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """Return RMSNorm(x) * weight * silu(gate). x: [T, H, D]; weight: [D]; gate: [T, H * D].

    The norm is over D. A new tensor [T, H * D] of x's dtype. No host sync; graph-capturable.
    """
    wide = x.float()
    normed = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return (normed.flatten(1) * functional.silu(gate.float())).to(x.dtype)
