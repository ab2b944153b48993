"""The draft head of a checkpoint (multi-token prediction, MTP)."""

from typing import cast

import torch
from torch import Tensor, nn

from minisgl.layers.attention import Attention
from minisgl.layers.embedding import LMHead
from minisgl.layers.linear import RowParallelLinear, UnquantizedLinear
from minisgl.layers.mixer import ForwardContext
from minisgl.layers.norm import CompleteNorm, ResidualNorm, ResidualStream
from minisgl.layers.shards import LinearShards, Shard, split_evenly
from minisgl.models.layer import DecoderLayer, ModelParts
from minisgl.models.spec import LayerSpec


class DraftHead(nn.Module):
    """Predicts the token after a token, from its embedding and the hidden state before it.

    One decoder layer computes y_p = norm(layer(fc[norm(E t_p) | norm(h_{p-1})])), where h_{p-1} is
    the hidden state of the model at position p - 1, after the final norm. The language-model head
    of y_p gives the draft of token p + 1. A further draft takes y_p in place of h_p, which the
    model has not computed yet. The keys and values of y_p are those of position p.

    Checkpoints store fc unquantised, also beside FP8 weights.

    vocabulary: a copy of the language-model head in the format of Quantization.draft_logits, or
    None. With several drafts a step reads the head several times, and a copy in FP8 is half as
    large.
    """

    def __init__(self, parts: ModelParts, spec: LayerSpec, ids: Shard) -> None:
        """ids: the token ids of this rank, as LMHead.shard."""
        super().__init__()
        config, comm = parts.config, parts.comm
        size, tp = config.hidden_size, comm.tp
        norm = (size, config.norm_eps, comm, spec.norms.offset)
        self.pre_fc_norm_embedding = ResidualNorm(*norm)
        self.pre_fc_norm_hidden = CompleteNorm(*norm)
        linear = parts.linear._replace(parent="mtp", method=UnquantizedLinear)
        inputs = split_evenly("fc", 2 * size, tp.rank, tp.size)
        self.fc = RowParallelLinear(inputs, size, False, linear)
        layers = nn.ModuleList([DecoderLayer(parts, spec, "mtp.layers.0")])
        self.layers = cast("list[DecoderLayer]", layers)
        self.norm = ResidualNorm(*norm)
        self.vocabulary = None
        if parts.draft_logits is not None:
            stored = "model.embed_tokens" if config.tied_embeddings else "lm_head"
            rows, whole = ids._replace(name=stored), Shard("", size, 0, size)
            shards = LinearShards((rows,), whole, bias=False)
            self.vocabulary = parts.draft_logits(shards, parts.linear.dtype)

    def logits(self, y: Tensor, lm_head: LMHead) -> Tensor:
        """Return the logits of drafts, as LMHead.logits. y: [T, H], of `forward`."""
        copy = self.vocabulary
        return lm_head.logits(y) if copy is None else lm_head.cap(copy.product(y))

    def forward(self, embedded: Tensor, before: Tensor, context: ForwardContext) -> Tensor:
        """Return y [T, H], and store the keys and values of the T tokens.

        embedded: [T, H], the part of the token embedding of this rank. before: [T, H], the hidden
        state before each token, equal on all ranks.
        """
        (layer,) = self.layers
        stream = layer.project(layer.attend(self._stream(embedded, before), context))
        return self.norm.forward(stream)[0].x

    def store(self, embedded: Tensor, before: Tensor, context: ForwardContext) -> None:
        """Store the keys and values as `forward`, and compute nothing else. No token attends."""
        (layer,) = self.layers
        block_input, _ = layer.input_layernorm(self._stream(embedded, before))
        cast("Attention", layer.mixer).store(block_input, context)

    def fold_norms(self) -> None:
        """As CausalLM.fold_norms."""
        for layer in self.layers:
            layer.fold_norms()

    def _stream(self, embedded: Tensor, before: Tensor) -> ResidualStream:
        hidden = self.pre_fc_norm_hidden.forward(ResidualStream(before))[0].x
        both = torch.cat((self.pre_fc_norm_embedding.of_sum(embedded), hidden), dim=1)
        inputs = self.fc.method.shards.inputs
        part = both[:, inputs.begin : inputs.end].contiguous()
        return ResidualStream(self.fc.method.product(part))
