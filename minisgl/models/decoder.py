"""The decoder of every supported family. Module names follow the checkpoints' tensor names."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from minisgl.attention.base import FusedAttention, NormRope, StepAttention
from minisgl.core import ConfigError
from minisgl.distributed.comm import Communicator
from minisgl.kernel import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool, KVSpec
from minisgl.layers.embedding import LMHead, ParallelEmbedding
from minisgl.layers.linear import ColumnParallelLinear, LinearBuild, RowParallelLinear
from minisgl.layers.mlp import GatedMlp
from minisgl.layers.norm import (
    BlockInput,
    CompleteNorm,
    ResidualNorm,
    ResidualStream,
    RMSNorm,
    norm_all_heads,
)
from minisgl.layers.rotary import rotary_order
from minisgl.layers.shards import Placement, Shard, merge, split_heads
from minisgl.models.config import ModelConfig, Multipliers
from minisgl.models.moe import MoeBlock
from minisgl.models.registry import Norms, QkNorm
from minisgl.moe.base import MoeBackend
from minisgl.moe.experts import ExpertsFactory


class ModelParts(NamedTuple):
    """The values that all modules of a model share.

    comm         the collectives between the tensor-parallel ranks.
    linear       the dtype and the method of all linear layers.
    experts      stores the experts of sparse layers.
    moe_backend  computes the experts of sparse layers. May be None without such layers.
    """

    config: ModelConfig
    comm: Communicator
    linear: LinearBuild
    experts: ExpertsFactory
    moe_backend: MoeBackend | None


class ForwardContext(NamedTuple):
    """The inputs that all layers of one forward share.

    positions    int32 [T], the position of each token in its request.
    slots        int32 [T] for each pool: the slot of each token's keys and values.
    ropes        float32 [max_seq_len, D], the rotary tables of ModelConfig.ropes.
    pools        the KV pools of ModelConfig.pools.
    attention    the attention of this step over the pools.
    query_scale  float32 [T, 1], the factor on the queries of each token; None: no factor.
    """

    positions: Tensor
    slots: Sequence[Tensor]
    ropes: tuple[Tensor, ...]
    pools: tuple[KVPool, ...]
    attention: StepAttention
    query_scale: Tensor | None = None


class Attended(NamedTuple):
    """The output of a layer's attention before the output projection, with the residual stream.

    heads: [T, Hq * D]; residual: [T, H].
    """

    heads: Tensor
    residual: Tensor

    def take_rows(self, rows: Tensor, comm: Communicator) -> "Attended":
        """Return copies of the activations of B tokens. rows: integers [B], indices of the tokens.

        A rank may hold the complete sum of the residual stream for some tokens only. In the result
        every rank has the complete sum for all B tokens.
        """
        return Attended(self.heads[rows], comm.take_rows(self.residual, rows))


class Attention(nn.Module):
    """Self-attention over this rank's heads. The decoder layer applies o_proj.

    sinks: [Hq], the logits of the sinks of this rank's heads; None if the family has none.
    """

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        config, tp, spec = parts.config, parts.comm.tp, parts.config.layers[layer]
        size, eps, dim = config.hidden_size, config.norm_eps, spec.kv.head_dim
        if config.q_heads % tp.size:
            raise ConfigError(
                f"{config.q_heads} attention heads cannot be split over tensor-parallel {tp.size}: "
                "use a number of ranks that divides them"
            )
        order = rotary_order(dim, config.ropes[spec.rope].rotary_dim)
        output = split_heads("o_proj", config.q_heads, dim, tp.rank, tp.size)
        v = split_heads("v_proj", spec.kv.kv_heads, dim, tp.rank, tp.size)
        q, k = output._replace(name="q_proj", order=order), v._replace(name="k_proj", order=order)
        qkv = merge("qkv_proj", (q, k, v)) if config.family.merged_linears else (q, k, v)
        linear = parts.linear._replace(parent=f"model.layers.{layer}.self_attn")
        self.comm, self.kv_layer, self.rope = parts.comm, spec.kv_layer, spec.rope
        self.pool = int(spec.rule.window is not None)
        self.head_dim = dim
        self.q_heads, self.kv_heads = q.local // dim, k.local // dim
        self.qkv_proj = ColumnParallelLinear(size, qkv, config.qkv_bias, linear)
        self.o_proj = RowParallelLinear(output, size, config.output_bias, linear)
        self.eps = eps
        self.qk_norm = config.family.qk_norm
        if self.qk_norm is QkNorm.PER_HEAD:
            q = k = Shard("", dim, 0, dim, order)
        offset = config.family.offset_norms
        self.q_norm = RMSNorm(q, eps, offset) if self.qk_norm else None
        self.k_norm = RMSNorm(k, eps, offset) if self.qk_norm else None
        self.sink_heads = split_heads("sinks", config.q_heads, 1, tp.rank, tp.size)
        self.sinks = nn.Parameter(torch.empty(self.q_heads)) if config.family.sinks else None

    def forward(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        """Store keys and values of the T tokens, and attend. Returns [T, Hq * D]."""
        attention = context.attention
        q_weight = k_weight = None
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        qkv = self.qkv_proj.forward(block_input)
        if q_weight is not None and k_weight is not None and self.qk_norm is QkNorm.ALL_HEADS:
            parts = qkv[:, : len(q_weight)], qkv[:, len(q_weight) :][:, : len(k_weight)]
            norm_all_heads(parts, (q_weight, k_weight), self.eps, self.comm)
            q_weight = k_weight = None
        if context.query_scale is not None:
            qkv[:, : self.q_heads * self.head_dim].mul_(context.query_scale)
        heads = NormRope(q_weight, k_weight, self.eps, context.ropes[self.rope])
        attended = qkv.new_empty((len(qkv), self.q_heads, self.head_dim))
        if isinstance(attention, FusedAttention):
            attention.attend(self.kv_layer, qkv, heads, attended, self.sinks)
        else:
            pool, layer = context.pools[self.pool], self.kv_layer
            places = (context.positions, context.slots[self.pool], *pool.layer(layer))
            sizes = (self.q_heads, self.kv_heads, self.head_dim)
            q = qk_norm_rope_store(qkv, *heads, *places, *sizes, pool.scales(layer))
            attention.forward(self.kv_layer, q, attended, self.sinks)
        return attended.flatten(1)

    def scale_queries(self, factor: float) -> None:
        """Multiply the queries by `factor`, in the loaded weights. Raises ConfigError."""
        if self.q_norm is not None:
            self.q_norm.weight.mul_(factor)
        else:
            self.qkv_proj.method.scale_rows(0, self.q_heads * self.head_dim, factor)

    def placements(self, name: str) -> Iterator[Placement]:
        if self.sinks is not None:
            name, shard = f"{name}.sinks", self.sink_heads
            yield Placement(name, (shard.full,), name, 0, shard.begin, shard.end)


class DecoderLayer(nn.Module):
    """Attention and MLP on the residual stream, each after a norm of its own."""

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        config, comm, size = parts.config, parts.comm, parts.config.hidden_size
        self.input_layernorm = ResidualNorm(size, config.stream_eps, comm)
        self.self_attn = Attention(parts, layer)
        self.post_attention_layernorm = ResidualNorm(size, config.stream_eps, comm)
        linear = parts.linear._replace(parent=f"model.layers.{layer}.mlp")
        self.mlp: nn.Module
        if config.moe is not None and config.moe.has_experts(layer):
            assert parts.moe_backend is not None, "sparse layers need a backend: this is a bug"
            self.mlp = MoeBlock(size, config.moe, linear, parts.experts, parts.moe_backend)
        else:
            self.mlp = GatedMlp(
                size,
                config.intermediate_size,
                linear,
                bias=config.mlp_bias,
                merged=config.family.merged_linears,
                gelu=config.activation != "silu",
            )

    def attend(self, stream: ResidualStream, context: ForwardContext) -> Attended:
        """The first half of the layer: the norm and attention."""
        block_input, residual = self.input_layernorm(stream)
        return Attended(self.self_attn(block_input, context), residual)

    def project(self, attended: Attended) -> ResidualStream:
        """The second half of the layer: o_proj, the norm and the MLP. Overwrites the residual."""
        stream = self.self_attn.o_proj(*attended)
        block_input, residual = self.post_attention_layernorm(stream)
        out: ResidualStream = self.mlp(block_input, residual)
        return out

    def fold_norms(self) -> None:
        """Move the norms' weights into the linears that read them, if their methods can."""
        self.input_layernorm.fold_with(self.self_attn.qkv_proj.method.fold)
        if isinstance(self.mlp, GatedMlp):
            self.post_attention_layernorm.fold_with(self.mlp.gate_up_proj.method.fold)

    def scale_outputs(self, factor: float) -> None:
        """Multiply the loaded weights of each block's last products by `factor`.

        Raises ConfigError if a linear method cannot scale its weights.
        """
        for linear in (self.self_attn.o_proj, cast("GatedMlp", self.mlp).down_proj):
            linear.method.scale_rows(0, linear.method.shards.rows, factor)


class NormAfterLayer(DecoderLayer):
    """Attention and MLP on the residual stream, each before a norm of its own (OLMo 2, EXAONE 4).

    With Norms.BOTH, a further norm precedes each of the two (Gemma). Every rank holds the complete
    stream.
    """

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__(parts, layer)
        config, comm = parts.config, parts.comm
        size, offset = config.hidden_size, config.family.offset_norms
        # These norms replace those of DecoderLayer.
        self.post_attention_layernorm = ResidualNorm(size, config.norm_eps, comm, offset)
        self.post_feedforward_layernorm = ResidualNorm(size, config.norm_eps, comm, offset)
        if config.family.norms is Norms.BOTH:
            eps = config.stream_eps
            self.input_layernorm = CompleteNorm(size, eps, comm, offset)
            self.pre_feedforward_layernorm = CompleteNorm(size, eps, comm, offset)
        else:
            self.register_module("input_layernorm", None)
            self.register_module("pre_feedforward_layernorm", None)

    def attend(self, stream: ResidualStream, context: ForwardContext) -> Attended:
        return Attended(self.self_attn(_before(self.input_layernorm, stream.x), context), stream.x)

    def project(self, attended: Attended) -> ResidualStream:
        product = self.self_attn.o_proj.method.product(attended.heads)
        x = attended.residual + self.post_attention_layernorm.of_sum(product)
        block_input = _before(self.pre_feedforward_layernorm, x)
        product = cast("GatedMlp", self.mlp).product(block_input)
        return ResidualStream(x + self.post_feedforward_layernorm.of_sum(product))

    def fold_norms(self) -> None:
        """Nothing is folded: each linear gets the complete and normalised stream."""

    def scale_outputs(self, factor: float) -> None:
        self.post_attention_layernorm.weight.mul_(factor)
        self.post_feedforward_layernorm.weight.mul_(factor)


def _before(norm: ResidualNorm | None, x: Tensor) -> BlockInput:
    """Return the input of a block: the stream x [T, H], after the norm if there is one."""
    return BlockInput(x) if norm is None else norm.forward(ResidualStream(x))[0]


class Decoder(nn.Module):
    """Token embedding, decoder layers and final norm.

    `forward` is the whole computation. After the attention of the last layer, only the tokens whose
    logits the sampler reads need further computation. CUDA graphs therefore cut the forward there,
    and the engine calls its three parts.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, comm = parts.config, parts.comm
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, comm)
        norms_after = config.family.norms is not Norms.BEFORE
        kind = NormAfterLayer if norms_after else DecoderLayer
        layers = nn.ModuleList(kind(parts, i) for i in range(config.num_layers))
        self.layers = cast("list[DecoderLayer]", layers)
        final_norm = CompleteNorm if norms_after else ResidualNorm
        size, offset = config.hidden_size, config.family.offset_norms
        self.norm = final_norm(size, config.stream_eps, comm, offset)
        self.sums_embedding = norms_after and comm.tp.size > 1

    def forward(self, ids: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states after the final norm: [T, H], or [B, H] of the tokens `rows`.

        ids: integers [T]. rows: integers [B]. Keys and values of all T tokens are stored.
        """
        attended = self.forward_to_last_attention(ids, context)
        if rows is not None:
            attended = attended.take_rows(rows, self.norm.comm)
        return self.finish_last_layer(attended)

    def forward_to_last_attention(
        self, ids: Tensor, context: ForwardContext, most: int | None = None
    ) -> Attended:
        """Compute the forward up to the attention of the last layer. ids: integers [T].

        most: run at most this many of the layers before the last one. The output is then not that
        of the model. None: run all layers.
        """
        x = self.embed_tokens(ids)
        stream = ResidualStream(self.norm.comm.gather(x).sum(0) if self.sums_embedding else x)
        *first_layers, last_layer = self.layers
        for layer in first_layers[:most]:
            stream = layer.project(layer.attend(stream, context))
        return last_layer.attend(stream, context)

    def finish_last_layer(self, attended: Attended) -> Tensor:
        """Return the hidden states [T, H] after the final norm. Overwrites attended.residual."""
        return self.norm.forward(self.layers[-1].project(attended))[0].x

    def empty_attended(self, num_tokens: int) -> Attended:
        """Return zeros for `num_tokens` tokens: the fixed input of a graph of finish_last_layer."""
        shards = self.layers[-1].self_attn.o_proj.method.shards
        weight = self.norm.weight
        heads, residual = (num_tokens, shards.inputs.local), (num_tokens, shards.rows)
        return Attended(weight.new_zeros(heads), weight.new_zeros(residual))


class CausalLM(nn.Module):
    """One rank's share of a decoder-only language model.

    `model` computes hidden states; `lm_head` computes logits from them and samples.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config = parts.config
        self.config = config
        self.model = Decoder(parts)
        cap = config.logits_soft_cap
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parts.comm, cap)
        if config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def logits(self, attended: Attended, out: Tensor | None = None) -> Tensor:
        """Finish the last layer and return this rank's logits, as LMHead.logits.

        Overwrites attended.residual.
        """
        return self.lm_head.logits(self.model.finish_last_layer(attended), out)

    def fold_norms(self) -> None:
        """Fold each norm into the linear after it, if the method of that linear can.

        Call this only without tensor parallelism. The results differ by rounding only.
        """
        for layer in self.model.layers:
            layer.fold_norms()

    def fold_multipliers(self) -> None:
        """Multiply the loaded weights by the factors of the config.

        The embedding stays as it is, because the head may share it. Instead, each block divides its
        output by the factor of the embedding. The norms undo this division, with the epsilon of
        ModelConfig.stream_eps. Raises ConfigError if a linear method cannot scale its weights.
        """
        factors = self.config.multipliers
        if factors == Multipliers():
            return
        for layer in self.model.layers:
            if factors.query != 1.0:
                layer.self_attn.scale_queries(factors.query)
            layer.scale_outputs(factors.residual / factors.embedding)
        self.model.norm.weight.div_(factors.logits)


def local_kv_spec(
    config: ModelConfig, comm: Communicator, dtype: torch.dtype, fp8: bool = False
) -> KVSpec:
    """The state that each layer keeps for a token on this rank, in `dtype` or in FP8.

    All layers have the same spec.
    """
    (spec,) = {layer.kv for layer in config.layers}
    return spec._replace(kv_heads=max(spec.kv_heads // comm.tp.size, 1), dtype=dtype, fp8=fp8)
