"""The decoder of every supported family. Module names follow the checkpoints' tensor names."""

from dataclasses import dataclass
from typing import NamedTuple, cast

from torch import Tensor, nn

from minisgl.attention import FusedAttention, StepAttention
from minisgl.core import ConfigError
from minisgl.distributed import Communicator
from minisgl.kernel import qk_norm_rope_store
from minisgl.kvcache.pool import KVPool
from minisgl.layers import (
    ColumnParallelLinear,
    MergedGateUpLinear,
    Normed,
    RMSNorm,
    RowParallelLinear,
    Stream,
    StreamNorm,
    VocabMatrix,
    split_evenly,
    split_heads,
)
from minisgl.models.config import ModelConfig
from minisgl.models.moe import MoeBlock
from minisgl.moe import MoeBackend


@dataclass(frozen=True, slots=True, eq=False)
class ForwardContext:
    """What all layers of one forward share.

    positions, slots: int32 [T], where each token stands and where its KV goes in the pool;
    cos_sin: float32 [max_seq_len, D]; attention: of this step, over the pool.
    """

    positions: Tensor
    slots: Tensor
    cos_sin: Tensor
    pool: KVPool
    attention: StepAttention


class Attended(NamedTuple):
    """A layer half done. heads: [T, Hq * D], what attention gives; residual: [T, H], beside it."""

    heads: Tensor
    residual: Tensor


class Attention(nn.Module):
    """Self-attention over this rank's heads; o_proj is left to the caller."""

    def __init__(self, config: ModelConfig, layer: int, comm: Communicator) -> None:
        super().__init__()
        rank, size, dim = comm.tp.rank, comm.tp.size, config.head_dim
        if config.q_heads % size:
            raise ConfigError(
                f"{config.q_heads} attention heads cannot be split over tensor-parallel {size}"
            )
        q = split_heads("q_proj", config.q_heads, dim, rank, size)
        k = split_heads("k_proj", config.kv_heads, dim, rank, size)
        self.layer = layer
        self.head_dim = dim
        self.q_heads, self.kv_heads = q.local // dim, k.local // dim
        parts = (q, k, k._replace(name="v_proj"))
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, config.qkv_bias)
        self.o_proj = RowParallelLinear(q, config.hidden_size, config.output_bias, comm.tp)
        normed = config.family.qk_norm
        self.q_norm = RMSNorm(dim, config.norm_eps) if normed else None
        self.k_norm = RMSNorm(dim, config.norm_eps) if normed else None

    def forward(self, normed: Normed, context: ForwardContext) -> Tensor:
        attention, q_norm, k_norm = context.attention, self.q_norm, self.k_norm
        norms = (
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            context.cos_sin,
        )
        qkv: Tensor = self.qkv_proj(normed)
        attended = qkv.new_empty((len(qkv), self.q_heads, self.head_dim))
        if isinstance(attention, FusedAttention):
            attention.attend(self.layer, qkv, *norms, attended)
        else:
            places = (context.positions, context.slots, *context.pool.layer(self.layer))
            sizes = (self.q_heads, self.kv_heads, self.head_dim)
            q = qk_norm_rope_store(qkv, *norms, *places, *sizes)
            attention.forward(self.layer, q, attended)
        return attended.flatten(1)


class GatedMlp(nn.Module):
    """down(silu(gate) * up); the inner size is padded where ranks do not divide it."""

    def __init__(self, config: ModelConfig, comm: Communicator) -> None:
        super().__init__()
        cut = split_evenly("gate_proj", config.intermediate_size, comm.tp.rank, comm.tp.size)
        parts = (cut, cut._replace(name="up_proj"))
        self.gate_up_proj = MergedGateUpLinear(config.hidden_size, parts, config.mlp_bias)
        self.down_proj = RowParallelLinear(cut, config.hidden_size, config.mlp_bias, comm.tp)

    def forward(self, normed: Normed, residual: Tensor) -> Stream:
        stream: Stream = self.down_proj(self.gate_up_proj(normed), residual)
        return stream


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it, on the residual stream."""

    def __init__(
        self, config: ModelConfig, layer: int, comm: Communicator, moe_backend: MoeBackend
    ) -> None:
        super().__init__()
        self.input_layernorm = StreamNorm(config.hidden_size, config.norm_eps, comm)
        self.self_attn = Attention(config, layer, comm)
        self.post_attention_layernorm = StreamNorm(config.hidden_size, config.norm_eps, comm)
        if config.moe is not None and layer in config.moe.sparse_layers:
            self.mlp: nn.Module = MoeBlock(config.hidden_size, config.moe, comm, moe_backend)
        else:
            self.mlp = GatedMlp(config, comm)

    def forward(self, stream: Stream, context: ForwardContext) -> Stream:
        return self.finish(self.self_attn.o_proj(*self.attend(stream, context)))

    def attend(self, stream: Stream, context: ForwardContext) -> Attended:
        normed, residual = self.input_layernorm(stream)
        return Attended(self.self_attn(normed, context), residual)

    def finish(self, stream: Stream) -> Stream:
        """What follows on o_proj."""
        end: Stream = self.mlp(*self.post_attention_layernorm(stream))
        return end

    def fold_norms(self) -> None:
        """Let products of one rank norm what they read."""
        self.input_layernorm.fold_into(self.self_attn.qkv_proj.weight)
        if isinstance(self.mlp, GatedMlp):
            self.post_attention_layernorm.fold_into(self.mlp.gate_up_proj.weight)


class Decoder(nn.Module):
    """Embedding, layers and final norm, cut behind the last attention: by then all keys and values
    are stored, and of few tokens more is wanted."""

    def __init__(self, config: ModelConfig, comm: Communicator, moe_backend: MoeBackend) -> None:
        super().__init__()
        self.embed_tokens = VocabMatrix(config.vocab_size, config.hidden_size, comm)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layer, comm, moe_backend) for layer in range(config.num_layers)
        )
        self.norm = StreamNorm(config.hidden_size, config.norm_eps, comm)

    def forward(self, ids: Tensor, context: ForwardContext) -> Attended:
        """Up to the attention of the last layer. ids: integers [T]."""
        stream = Stream(self.embed_tokens.embed(ids))
        *layers, last = cast("list[DecoderLayer]", self.layers)
        for layer in layers:
            stream = layer(stream, context)
        return last.attend(stream, context)

    def room_for(self, rows: int) -> Attended:
        """Zeros, for the graphs that `finish`."""
        weight = cast("DecoderLayer", self.layers[-1]).self_attn.o_proj.weight
        size, width = weight.shape
        return Attended(weight.new_zeros((rows, width)), weight.new_zeros((rows, size)))

    def take(self, attended: Attended, rows: Tensor) -> Attended:
        """A copy of the tokens `rows`, integers [B]."""
        return Attended(attended.heads[rows], self.norm.comm.take_rows(attended.residual, rows))

    def finish(self, attended: Attended) -> Tensor:
        """The hidden states [T, H] after the final norm. attended.residual is given up."""
        last = cast("DecoderLayer", self.layers[-1])
        normed: Normed = self.norm(last.finish(last.self_attn.o_proj(*attended)))[0]
        return normed.x


class CausalLM(nn.Module):
    """One rank's share of a decoder-only language model: `model`, then `logits`."""

    def __init__(self, config: ModelConfig, comm: Communicator, moe_backend: MoeBackend) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, comm, moe_backend)
        if not config.tied_embeddings:
            self.lm_head = VocabMatrix(config.vocab_size, config.hidden_size, comm)

    def logits(self, attended: Attended, out: Tensor | None = None) -> Tensor:
        """What model.finish and head.logits give. attended.residual is given up."""
        return self.head.logits(self.model.finish(attended), out)

    @property
    def head(self) -> VocabMatrix:
        """What makes logits and tokens of hidden states."""
        return self.model.embed_tokens if self.config.tied_embeddings else self.lm_head

    def fold_norms(self) -> None:
        """Let products of one rank norm what they read; changes nothing but rounding."""
        for module in self.modules():
            if isinstance(module, DecoderLayer):
                module.fold_norms()


def local_kv_heads(config: ModelConfig, comm: Communicator) -> int:
    """KV heads that this rank stores."""
    return max(config.kv_heads // comm.tp.size, 1)
