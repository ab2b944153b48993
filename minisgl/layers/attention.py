"""Self-attention over keys and values in the KV pool."""

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from minisgl.attention.base import AttentionRule, FusedAttention, NormRope
from minisgl.kernel.dispatch import multiply_sigmoid, qk_norm_rope_store, rms_norm
from minisgl.kvcache.pool import KVPool, KVSpec
from minisgl.layers.linear import ColumnParallelLinear, LinearMethod, RowParallelLinear
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.norm import BlockInput, RMSNorm, UnweightedNorm, norm_all_heads
from minisgl.layers.rotary import Rope, rotary_order
from minisgl.layers.shards import Placement, Shard, merge, split_heads


class QkNorm(Enum):
    """The RMSNorm of queries and keys before the rotation."""

    PER_HEAD = auto()
    PER_HEAD_UNWEIGHTED = auto()
    ALL_HEADS = auto()  # over the heads of all ranks together


class OutputGate(Enum):
    """The rows of the gate of attention's outputs in the checkpoint."""

    IN_QUERIES = auto()  # q_proj has the queries and then the gate of a head, for each head
    SEPARATE = auto()  # gate_proj


class AttentionSpec(NamedTuple):
    """The attention of one decoder layer, and the state that it keeps for each token.

    q_heads      the query heads of the whole model.
    rule         the window, the soft cap and the sinks.
    rope         the rotary embedding of queries and keys.
    kv           the state of one token: the KV heads of the whole model, in the checkpoint's dtype.
    kv_layer     the index of the layer's keys and values in the KV pool. Layers with the same index
                 share them. Indices run from 0 without gaps.
    stores       whether the layer computes and stores keys and values. If not, an earlier layer
                 with the same kv_layer, rule and kv has stored them (Gemma 4 E2B and E4B).
    qk_norm      the norm of queries and keys, or None.
    norm_offset  the checkpoint stores weight - 1 for this norm.
    qkv_bias     whether q, k and v have a bias.
    output_bias  whether the output projection has one.
    merged       the checkpoint stores q, k and v as one tensor.
    gate         each output is multiplied by the sigmoid of a gate; None: it is not.
    v_norm       whether an RMSNorm without weights normalises each value head.
    keys_as_values
                 the values are the keys before their norm and rotation: the checkpoint has no
                 v_proj.
    """

    q_heads: int
    rule: AttentionRule
    rope: Rope
    kv: KVSpec
    kv_layer: int
    stores: bool = True
    qk_norm: QkNorm | None = None
    norm_offset: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    merged: bool = False
    gate: OutputGate | None = None
    v_norm: bool = False
    keys_as_values: bool = False

    def weights(self, hidden_size: int) -> int:
        """The number of weights of the projections."""
        queries = (3 if self.gate else 2) * self.q_heads
        stored = 2 * self.kv.kv_heads if self.stores else 0
        return hidden_size * self.kv.head_dim * (queries + stored)

    def stored_weights(self, hidden_size: int) -> int:
        """The number of weights that Attention.store reads: all but the output projection."""
        return self.weights(hidden_size) - hidden_size * self.kv.head_dim * self.q_heads


class Attention(Mixer):
    """Self-attention over this rank's heads.

    sinks: [Hq], the logits of the sinks of this rank's heads; None if the rule has none.
    """

    name = "self_attn"

    def __init__(self, spec: AttentionSpec, build: MixerBuild) -> None:
        super().__init__()
        size, eps, dim, tp = build.size, build.eps, spec.kv.head_dim, build.comm.tp
        order = rotary_order(dim, spec.rope.rotary_dim)
        output = split_heads("o_proj", spec.q_heads, dim, tp.rank, tp.size)
        v = split_heads("v_proj", spec.kv.kv_heads, dim, tp.rank, tp.size, copies=True)
        q, k = output._replace(name="q_proj", order=order), v._replace(name="k_proj", order=order)
        if spec.keys_as_values:
            v = v._replace(name="k_proj")
        qkv: tuple[Shard, ...] = (q, k, v) if spec.stores else (q,)
        if spec.merged:
            qkv = merge("qkv_proj", qkv)
        if spec.gate is OutputGate.IN_QUERIES:
            qkv = (_gated(q, dim), *qkv[1:])
        elif spec.gate is OutputGate.SEPARATE:
            qkv = (output._replace(name="gate_proj"), *qkv)
        self.comm, self.spec = build.comm, spec
        self.rope = build.ropes.index(spec.rope)
        self.pool = int(spec.rule.window is not None)
        self.head_dim = dim
        self.q_heads, self.kv_heads = q.local // dim, k.local // dim if spec.stores else 0
        self.qkv_proj = ColumnParallelLinear(size, qkv, spec.qkv_bias, build.linear)
        self.out = RowParallelLinear(output, size, spec.output_bias, build.linear)
        self.eps = eps
        if spec.qk_norm is not QkNorm.ALL_HEADS:
            q = k = Shard("", dim, 0, dim, order)
        kind = UnweightedNorm if spec.qk_norm is QkNorm.PER_HEAD_UNWEIGHTED else RMSNorm
        self.q_norm = kind(q, eps, spec.norm_offset) if spec.qk_norm else None
        self.k_norm = kind(k, eps, spec.norm_offset) if spec.qk_norm and spec.stores else None
        self.sink_heads = split_heads("sinks", spec.q_heads, 1, tp.rank, tp.size)
        self.sinks = nn.Parameter(torch.empty(self.q_heads)) if spec.rule.sinks else None

    @property
    def kind(self) -> Hashable:
        return self.spec._replace(kv_layer=0)

    @property
    def ends_with_attention(self) -> bool:
        return self.spec.gate is None

    def state(self, pools: Sequence[KVPool], states: Sequence[Any]) -> Iterator[Tensor | None]:
        pool, layer = pools[self.pool], self.spec.kv_layer
        yield from (*pool.layer(layer), pool.scales(layer))

    def mix(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        """Store keys and values of the T tokens, and attend. Returns [T, Hq * D]."""
        attention, layer = context.attention, self.spec.kv_layer
        qkv, gate, heads = self._project(block_input, context)
        attended = qkv.new_empty((len(qkv), self.q_heads, self.head_dim))
        if self.spec.stores and isinstance(attention, FusedAttention):
            attention.attend(layer, qkv, heads, attended, self.sinks)
        else:
            q = self._store(qkv, heads, context)
            attention.forward(layer, q, attended, self.sinks)
        out = attended.flatten(1)
        return out if gate is None else multiply_sigmoid(out, gate)

    def store(self, block_input: BlockInput, context: ForwardContext) -> None:
        """Store keys and values of the T tokens, as `mix`. No token attends."""
        qkv, _, heads = self._project(block_input, context)
        self._store(qkv, heads, context)

    def _project(
        self, block_input: BlockInput, context: ForwardContext
    ) -> tuple[Tensor, Tensor | None, NormRope]:
        """Return queries, keys and values [T, n], the gate, and the norm and rotation to apply."""
        norms = self.q_norm, self.k_norm or self.q_norm  # a layer without keys has no k_norm
        q_weight, k_weight = (None if norm is None else norm.weight for norm in norms)
        qkv, gate = self.qkv_proj.forward(block_input), None
        if self.spec.gate:
            width = self.q_heads * self.head_dim
            gate, qkv = qkv[:, :width], qkv[:, width:]
        is_wide = self.spec.qk_norm is QkNorm.ALL_HEADS
        if q_weight is not None and k_weight is not None and is_wide:
            parts = qkv[:, : len(q_weight)], qkv[:, len(q_weight) :][:, : len(k_weight)]
            norm_all_heads(parts, (q_weight, k_weight), self.eps, self.comm)
            q_weight = k_weight = None
        if self.spec.v_norm and self.spec.stores:
            values = qkv.view(len(qkv), -1, self.head_dim)[:, -self.kv_heads :]
            values.copy_(rms_norm(values, None, self.eps))
        if context.query_scale is not None:
            qkv[:, : self.q_heads * self.head_dim].mul_(context.query_scale)
        return qkv, gate, NormRope(q_weight, k_weight, self.eps, context.ropes[self.rope])

    def _store(self, qkv: Tensor, heads: NormRope, context: ForwardContext) -> Tensor:
        """Normalise and rotate, store keys and values, and return the queries [T, Hq, D]."""
        pool, layer = context.pools[self.pool], self.spec.kv_layer
        places = (context.positions, context.slots[self.pool], *pool.layer(layer))
        sizes = (self.q_heads, self.kv_heads, self.head_dim)
        return qk_norm_rope_store(qkv, *heads, *places, *sizes, pool.scales(layer))

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        return self.qkv_proj.method.fold(norm_weight, before)

    def scale_queries(self, factor: float | None) -> None:
        factor = self.head_dim**0.5 if factor is None else factor
        if self.q_norm is not None:
            self.q_norm.weight.mul_(factor)
        else:
            width = self.q_heads * self.head_dim
            first = width if self.spec.gate else 0
            self.qkv_proj.method.scale_rows(first, first + width, factor)

    def placements(self, name: str) -> Iterator[Placement]:
        if self.sinks is not None:
            name, shard = f"{name}.sinks", self.sink_heads
            yield Placement(name, (shard.full,), name, 0, shard.begin, shard.end)


def _gated(q: Shard, dim: int) -> Shard:
    """Return the share of q_proj that has the gates of these heads beside their queries.

    q: the share of the queries, of heads of `dim` elements. The model stores the gates of all heads
    first, and then the queries, so that queries, keys and values stay neighbours.
    """
    heads = range(0, 2 * q.local, 2 * dim)
    gates = [head + dim + i for head in heads for i in range(dim)]
    queries = [head + i for head in heads for i in q.order or range(dim)]
    doubled = q._replace(full=2 * q.full, begin=2 * q.begin, local=2 * q.local)
    return doubled._replace(order=(*gates, *queries))
