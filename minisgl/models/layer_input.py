"""An input of each layer beside the residual stream: per-layer embeddings (Gemma 4 E2B, E4B).

The input of layer l for a token is (n + e) / sqrt(2), a vector of LayerInputSpec.width elements. e
is the token's row in a second embedding, multiplied by sqrt(width); n is an RMSNorm of a linear of
the token embedding. Both compute the inputs of all layers at once. Every rank holds a share of the
elements of each input.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from minisgl.distributed.comm import Communicator, TPInfo
from minisgl.kernel.dispatch import gather_embedding
from minisgl.layers.linear import ColumnParallelLinear, LinearBuild, RowParallelLinear
from minisgl.layers.norm import BlockInput, ResidualNorm, RMSNorm
from minisgl.layers.shards import Placement, Shard, split_evenly
from minisgl.models.spec import LayerInputSpec, ModelSpec


class LayerInputs(nn.Module):
    """Computes the inputs of all layers for the tokens of a step."""

    def __init__(
        self, config: ModelSpec, spec: LayerInputSpec, comm: Communicator, linear: LinearBuild
    ) -> None:
        """spec: that of any layer. linear: its parent is the full name of this module."""
        super().__init__()
        layers, hidden = config.num_layers, config.hidden_size
        self.comm, self.layers, self.width = comm, layers, spec.width
        self.factor = spec.embedding_factor
        columns = _columns(spec.width, layers, comm.tp)
        self.embed_tokens_per_layer = _Embedding(config.vocab_size, columns)
        outputs = tuple(part._replace(name="per_layer_model_projection") for part in columns)
        self.projection = ColumnParallelLinear(hidden, outputs, False, linear)
        self.per_layer_projection_norm = RMSNorm(spec.share(comm.tp), config.norm_eps)
        # The linear gets the embedding without its factor. This epsilon has the same result.
        scale = config.multipliers.embedding / hidden**0.5
        self.eps = config.norm_eps / scale**2

    def forward(self, ids: Tensor, stream: Tensor) -> Tensor:
        """Return the inputs [layers, T, n]. ids: integers [T]; stream: [T, H], complete."""
        norm = self.per_layer_projection_norm.weight
        shape = (len(ids), self.layers, len(norm))
        projected = self.projection.forward(BlockInput(stream)).view(shape).float()
        squares = self.comm.gather(projected.square().sum(-1, keepdim=True)).sum(0)
        normed = projected * torch.rsqrt(squares / self.width + self.eps) * norm
        embedded = self.embed_tokens_per_layer(ids).view(shape)
        total = torch.add(normed, embedded, alpha=self.factor).mul_(0.5**0.5)
        return total.to(stream.dtype).transpose(0, 1)


class LayerInputBlock(nn.Module):
    """The block of a layer that reads the layer's input: down(gelu(gate(stream)) * input).

    A norm follows. The block stands after the MLP.
    """

    def __init__(
        self, config: ModelSpec, spec: LayerInputSpec, comm: Communicator, linear: LinearBuild
    ) -> None:
        super().__init__()
        self.spec, self.factor = spec, config.multipliers.embedding
        share, size = spec.share(comm.tp), config.hidden_size
        gate = share._replace(name="per_layer_input_gate")
        self.gate = ColumnParallelLinear(size, (gate,), False, linear)
        inputs = share._replace(name="per_layer_projection")
        self.out = RowParallelLinear(inputs, size, False, linear)
        self.post_per_layer_input_norm = ResidualNorm(size, config.norm_eps, comm)
        self.width = share.local

    def forward(self, stream: Tensor, own: Tensor) -> Tensor:
        """Return the output [T, H], valid until the next sum.

        stream: [T, H], complete and without the factor of the embedding; own: [T, width], the
        layer's input.
        """
        gate = self.gate.forward(BlockInput(stream)).mul_(self.factor)
        product = self.out.method.product(self.spec.activation(torch.cat((gate, own), dim=1)))
        return self.post_per_layer_input_norm.of_sum(product)


class _Embedding(nn.Module):
    """weight: [V, columns], a share of each layer's elements."""

    def __init__(self, vocab_size: int, columns: tuple[Shard, ...]) -> None:
        super().__init__()
        self.columns = columns
        self.weight = nn.Parameter(torch.empty(vocab_size, sum(part.local for part in columns)))

    def forward(self, ids: Tensor) -> Tensor:
        return gather_embedding(ids, self.weight, 0, None)

    def placements(self, name: str) -> Iterator[Placement]:
        name, offset = f"{name}.weight", 0
        for part in self.columns:
            yield Placement(name, (len(self.weight), part.stored), name, 1, *part.read, offset)
            offset += part.local


def _columns(width: int, layers: int, tp: TPInfo) -> tuple[Shard, ...]:
    """Return this rank's share of `layers` times `width` features, which are one tensor."""
    if tp.size == 1:
        return (Shard("", layers * width, 0, layers * width),)
    share = split_evenly("", width, tp.rank, tp.size)
    shifts = range(0, layers * width, width)
    return tuple(share._replace(shift=shift, rows=layers * width) for shift in shifts)
