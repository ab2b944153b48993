"""The decoder of every supported family. Module names follow the checkpoints' tensor names."""

from typing import cast

import torch
from torch import Tensor, nn

from minisgl.distributed.comm import Communicator
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.embedding import LMHead, ParallelEmbedding
from minisgl.layers.mixer import ForwardContext
from minisgl.layers.norm import CompleteNorm, ResidualNorm, ResidualStream
from minisgl.models.encoder import ImageEncoder
from minisgl.models.gemma4_layer import ExpertsBesideLayer, ScaledLayer
from minisgl.models.layer import (
    Attended,
    DecoderLayer,
    DeepStackLayer,
    ModelParts,
    NormAfterLayer,
)
from minisgl.models.layer_input import LayerInputs
from minisgl.models.mtp import DraftHead
from minisgl.models.spec import LayerSpec, ModelSpec, Multipliers


class Decoder(nn.Module):
    """Token embedding, decoder layers and final norm.

    After the attention of the last layer, only the tokens whose logits the sampler reads need
    further computation. The forward is therefore cut there: the engine calls
    `forward_to_last_attention`, Attended.take_rows and `finish_last_layer`.
    """

    def __init__(self, parts: ModelParts) -> None:
        super().__init__()
        config, comm = parts.config, parts.comm
        norm_eps = config.norm_eps if config.embedding_norm else None
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, comm, norm_eps)
        norms = config.layers[0].norms
        named = ((spec, f"model.layers.{i}") for i, spec in enumerate(config.layers))
        layers = nn.ModuleList(_layer_kind(spec)(parts, spec, name) for spec, name in named)
        self.layers = cast("list[DecoderLayer]", layers)
        own, self.layer_inputs = config.layers[0].input, None
        if own is not None:
            linear = parts.linear._replace(parent=config.stored_name("model.layer_inputs"))
            self.layer_inputs = LayerInputs(config, own, comm, linear)
        final_norm = CompleteNorm if norms.after else ResidualNorm
        self.norm = final_norm(config.hidden_size, config.stream_eps, comm, config.norm_offset)
        self.sums_embedding = norms.after and comm.tp.size > 1

    def forward_to_last_attention(
        self, ids: Tensor, context: ForwardContext, most: int | None = None
    ) -> Attended:
        """Compute the forward up to the attention of the last layer. ids: integers [T].

        Keys and values of all T tokens are stored.

        most: run at most this many of the layers before the last one. The output is then not that
        of the model. None: run all layers.
        """
        x = self.embed_tokens(ids)
        stream = ResidualStream(self.norm.comm.gather(x).sum(0) if self.sums_embedding else x)
        if self.layer_inputs is not None:
            context = context._replace(inputs=self.layer_inputs(ids, stream.x))
        *first_layers, last_layer = self.layers
        for layer in first_layers[:most]:
            stream = layer.project(layer.attend(stream, context))
        return last_layer.attend(stream, context)

    def finish_last_layer(self, attended: Attended) -> Tensor:
        """Return the hidden states [T, H] after the final norm. Overwrites attended.residual."""
        return self.norm.forward(self.layers[-1].project(attended))[0].x

    def empty_attended(self, num_tokens: int) -> Attended:
        """Return zeros for `num_tokens` tokens: the fixed input of a graph of finish_last_layer."""
        weight = self.norm.weight
        heads, residual = (num_tokens, self.layers[-1].attended_width), (num_tokens, len(weight))
        return Attended(weight.new_zeros(heads), weight.new_zeros(residual))


def _layer_kind(spec: LayerSpec) -> type[DecoderLayer]:
    """Return the class of a layer."""
    if spec.beside is not None:
        return ExpertsBesideLayer
    if spec.norms.scaled or spec.input is not None:
        return ScaledLayer
    if spec.norms.after:
        return NormAfterLayer
    return DecoderLayer if spec.tap is None else DeepStackLayer


class CausalLM(nn.Module):
    """One rank's share of a decoder-only language model.

    `model` computes hidden states; `lm_head` computes logits from them and samples. `mtp` makes
    drafts; None without a draft head. `encoder` encodes images; None without an encoder, and on all
    ranks but rank 0.
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
        self.mtp = None
        if config.draft_head is not None:
            self.mtp = DraftHead(parts, config.draft_head, self.lm_head.shard)
        encoder = config.encoder if parts.comm.tp.rank == 0 else None
        self.encoder = None if encoder is None else ImageEncoder(encoder)

    def logits(self, attended: Attended, out: Tensor | None = None) -> Tensor:
        """Finish the last layer and return this rank's logits, as LMHead.logits.

        Overwrites attended.residual.
        """
        return self.lm_head.logits(self.model.finish_last_layer(attended), out)

    def fold_norms(self) -> None:
        """Fold each norm into the linear after it, if the method of that linear can.

        Call this only without tensor parallelism. The results differ by rounding only.
        """
        before = None
        for layer in self.model.layers:
            before = layer.fold_norms(before)
        if self.mtp is not None:
            self.mtp.fold_norms()

    def fold_multipliers(self) -> None:
        """Multiply the loaded weights by the factors of the config.

        The embedding stays as it is, because the head may share it. Instead, each block divides its
        output by the factor of the embedding. The norms undo this division, with the epsilon of
        ModelSpec.stream_eps. Raises ConfigError if a linear method cannot scale its weights.
        """
        factors = self.config.multipliers
        if factors == Multipliers():
            return
        for layer in self.model.layers:
            if factors.query != 1.0:
                layer.mixer.scale_queries(factors.query)
            layer.scale_outputs(factors.residual / factors.embedding)
        self.model.norm.weight.div_(factors.logits)


def local_kv_specs(
    config: ModelSpec, comm: Communicator, dtype: torch.dtype, fp8: bool = False
) -> tuple[KVSpec, ...]:
    """The state that a layer of each KV pool keeps for a token on this rank, in `dtype` or FP8."""
    return tuple(
        spec.of_rank(comm.tp.size)._replace(dtype=dtype, fp8=fp8) for spec in config.kv_specs
    )
