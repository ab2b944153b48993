"""Mamba-2 (SSD): the torch references of one layer's step and of the norm of its output.

    S = e^g S + k d^T;  d = dt v;  g = -e^a_log dt;  o = S^T q + D v    for each token and head

The memory is that of a gated delta net (delta.py): q, k and v are C, B and x of the paper, and a
key head is a group. Only the rule for d differs, so the history and the state rule are the same.

Source: Transformers are SSMs (Dao, Gu, 2024), as transformers computes Granite 4.
"""

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional

from minisgl.kernel.delta import DeltaMemory, Inputs, convolve, recur, requests_of, split_channels
from minisgl.kernel.states import StateStep


class SsdWeights(NamedTuple):
    """The weights of one layer beside its projections, for this rank's heads.

    conv, bias              [2 Hk Dk + Hv Dv, TAPS] and [2 Hk Dk + Hv Dv] of the model's dtype: the
                            convolution of queries, keys and values.
    a_log, dt_bias, skip    float32 [Hv]. skip is D of the equations.
    """

    conv: Tensor
    bias: Tensor
    a_log: Tensor
    dt_bias: Tensor
    skip: Tensor


def selective_scan(
    mixed: Tensor, dt: Tensor, weights: SsdWeights, memory: DeltaMemory, step: StateStep
) -> Tensor:
    """Convolve the T tokens and run the recurrence over them; returns [T, Hv, Dv], mixed's dtype.

    mixed    [T, 2 Hk Dk + Hv Dv]: queries, keys and values before the convolution.
    dt       [T, Hv]: the step sizes before dt_bias and softplus.
    memory   read and updated in place: S up to step.target, the history after it.

    No host sync on a GPU; graph-capturable.
    """
    out = mixed.new_empty((len(mixed), *memory.deltas.shape[2:]))
    for tokens, rows, place in requests_of(memory, step):
        x = convolve(mixed[tokens], weights.conv, weights.bias, rows, *place)
        q, k, v = split_channels(x, rows)
        size = functional.softplus(dt[tokens].float() + weights.dt_bias)
        inputs = Inputs(q, k, v, -weights.a_log.exp() * size, size)
        o = recur(inputs, rows, *place, corrects=False)
        out[tokens] = (o + weights.skip[:, None] * v).to(out.dtype)
    return out


def gated_group_norm(x: Tensor, weight: Tensor, gate: Tensor, groups: int, eps: float) -> Tensor:
    """Return RMSNorm(x * silu(gate)) * weight, of x's dtype, a new tensor [T, N].

    x: [T, N]. weight: [N]. gate: [T, N]. The norm is over each of `groups` equal parts of N. The
    product is float32 and rounded once. No host sync; graph-capturable.
    """
    opened = (x.float() * functional.silu(gate.float())).view(len(x), groups, -1)
    factor = (opened.square().mean(-1, keepdim=True) + eps).rsqrt()
    return ((opened * factor).flatten(1) * weight.float()).to(x.dtype)
