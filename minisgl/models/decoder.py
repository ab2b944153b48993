"""The decoder of every supported family. Module names follow the checkpoints' tensor names."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from minisgl.attention.base import FusedAttention, NormRope, StepAttention
from minisgl.core import ConfigError
from minisgl.distributed.comm import Communicator
from minisgl.kernel import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool, KVSpec
from minisgl.layers.embedding import LMHead, ParallelEmbedding
from minisgl.layers.linear import (
    ColumnParallelLinear,
    LinearBuild,
    MergedGateUpLinear,
    RowParallelLinear,
)
from minisgl.layers.norm import BlockInput, ResidualNorm, ResidualStream, RMSNorm
from minisgl.layers.shards import split_evenly, split_heads
from minisgl.models.config import ModelConfig
from minisgl.models.moe import MoeBlock
from minisgl.moe.base import MoeBackend


class ModelParts(NamedTuple):
    """The values that all modules of a model share.

    comm         the collectives between the tensor-parallel ranks.
    linear       the dtype and the method of all linear layers.
    moe_backend  computes the experts of sparse layers.
    """

    config: ModelConfig
    comm: Communicator
    linear: LinearBuild
    moe_backend: MoeBackend


class ForwardContext(NamedTuple):
    """The inputs that all layers of one forward share.

    positions  int32 [T], the position of each token in its request.
    slots      int32 [T], the pool slot of each token's keys and values.
    cos_sin    float32 [max_seq_len, D], the rotary table.
    attention  the attention of this step over the pool.
    """

    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    pool: KVPool
    attention: StepAttention


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
    """Self-attention over this rank's heads. The decoder layer applies o_proj."""

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        config, tp, spec = parts.config, parts.comm.tp, parts.config.layers[layer]
        size, eps, dim = config.hidden_size, config.norm_eps, spec.kv.head_dim
        if config.q_heads % tp.size:
            raise ConfigError(
                f"{config.q_heads} attention heads cannot be split over tensor-parallel {tp.size}: "
                "use a number of ranks that divides them"
            )
        q = split_heads("q_proj", config.q_heads, dim, tp.rank, tp.size)
        k = split_heads("k_proj", spec.kv.kv_heads, dim, tp.rank, tp.size)
        qkv = (q, k, k._replace(name="v_proj"))
        output = q._replace(name="o_proj")
        self.kv_layer = spec.kv_layer
        self.head_dim = dim
        self.q_heads, self.kv_heads = q.local // dim, k.local // dim
        self.qkv_proj = ColumnParallelLinear(size, qkv, config.qkv_bias, parts.linear)
        self.o_proj = RowParallelLinear(output, size, config.output_bias, parts.linear)
        self.eps = eps
        self.q_norm = RMSNorm(dim, eps) if config.family.qk_norm else None
        self.k_norm = RMSNorm(dim, eps) if config.family.qk_norm else None

    def forward(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        """Store keys and values of the T tokens, and attend. Returns [T, Hq * D]."""
        attention = context.attention
        q_weight = None if self.q_norm is None else self.q_norm.weight
        k_weight = None if self.k_norm is None else self.k_norm.weight
        heads = NormRope(q_weight, k_weight, self.eps, context.cos_sin)
        qkv = self.qkv_proj.forward(block_input)
        attended = qkv.new_empty((len(qkv), self.q_heads, self.head_dim))
        if isinstance(attention, FusedAttention):
            attention.attend(self.kv_layer, qkv, heads, attended)
        else:
            pool, layer = context.pool, self.kv_layer
            places = (context.positions, context.slots, *pool.layer(layer))
            sizes = (self.q_heads, self.kv_heads, self.head_dim)
            q = qk_norm_rope_store(qkv, *heads, *places, *sizes, pool.scales(layer))
            attention.forward(self.kv_layer, q, attended)
        return attended.flatten(1)


class GatedMlp(nn.Module):
    """down(silu(gate) * up). The inner size is padded to a multiple of the number of ranks."""

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, tp = parts.config, parts.comm.tp
        size, bias = config.hidden_size, config.mlp_bias
        gate = split_evenly("gate_proj", config.intermediate_size, tp.rank, tp.size)
        up, down = gate._replace(name="up_proj"), gate._replace(name="down_proj")
        self.gate_up_proj = MergedGateUpLinear(size, (gate, up), bias, parts.linear)
        self.down_proj = RowParallelLinear(down, size, bias, parts.linear)

    def forward(self, block_input: BlockInput, residual: Tensor) -> ResidualStream:
        return self.down_proj.forward(self.gate_up_proj.forward(block_input), residual)


class DecoderLayer(nn.Module):
    """Attention and MLP on the residual stream, each after a norm of its own."""

    def __init__(self, parts: ModelParts, layer: int) -> None:
        super().__init__()
        config, comm = parts.config, parts.comm
        self.input_layernorm = ResidualNorm(config.hidden_size, config.norm_eps, comm)
        self.self_attn = Attention(parts, layer)
        self.post_attention_layernorm = ResidualNorm(config.hidden_size, config.norm_eps, comm)
        self.mlp: nn.Module
        if config.moe is not None and config.moe.has_experts(layer):
            self.mlp = MoeBlock(config.hidden_size, config.moe, comm, parts.moe_backend)
        else:
            self.mlp = GatedMlp(parts)

    def forward(
        self, stream: ResidualStream, context: ForwardContext, rows: Tensor | None = None
    ) -> ResidualStream:
        """Return the stream after this layer: of all T tokens, or of the tokens `rows` alone."""
        attended = self.attend(stream, context)
        if rows is not None:
            attended = attended.take_rows(rows, self.input_layernorm.comm)
        return self.project(attended)

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


class Decoder(nn.Module):
    """Token embedding, decoder layers and final norm.

    `forward` is the whole computation. After the attention of the last layer, only the tokens whose
    logits the sampler reads need further computation. CUDA graphs therefore cut the forward there,
    into `forward_to_last_attention`, Attended.take_rows and `finish_last_layer`.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, comm = parts.config, parts.comm
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, comm)
        layers = nn.ModuleList(DecoderLayer(parts, i) for i in range(config.num_layers))
        self.layers = cast("list[DecoderLayer]", layers)
        self.norm = ResidualNorm(config.hidden_size, config.norm_eps, comm)

    def forward(self, ids: Tensor, context: ForwardContext, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states after the final norm: [T, H], or [B, H] of the tokens `rows`.

        ids: integers [T]. rows: integers [B]. Keys and values of all T tokens are stored.
        """
        stream = self.layers[-1](self._before_last_layer(ids, context), context, rows)
        return self.norm.forward(stream)[0].x

    def _before_last_layer(self, ids: Tensor, context: ForwardContext) -> ResidualStream:
        """Return the stream before the last layer."""
        *layers, _ = self.layers
        stream = ResidualStream(self.embed_tokens(ids))
        for layer in layers:
            stream = layer(stream, context)
        return stream

    # The parts of forward, for CUDA graphs.

    def forward_to_last_attention(self, ids: Tensor, context: ForwardContext) -> Attended:
        """Compute the forward up to the attention of the last layer. ids: integers [T]."""
        return self.layers[-1].attend(self._before_last_layer(ids, context), context)

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
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, parts.comm)
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


def local_kv_spec(
    config: ModelConfig, comm: Communicator, dtype: torch.dtype, fp8: bool = False
) -> KVSpec:
    """The state that each layer keeps for a token on this rank, in `dtype` or in FP8.

    All layers have the same spec, because all share one page table.
    """
    (spec,) = {layer.kv for layer in config.layers}
    return spec._replace(kv_heads=max(spec.kv_heads // comm.tp.size, 1), dtype=dtype, fp8=fp8)
