"""A decoder layer whose MLP has experts beside it, as in Gemma 4."""

import math
from collections.abc import Iterator
from typing import cast

from torch import Tensor

from minisgl.layers.mlp import DenseMlp
from minisgl.layers.norm import CompleteNorm, ResidualNorm, ResidualStream
from minisgl.layers.shards import Placement
from minisgl.models.layer import ModelParts, NormAfterLayer, normed
from minisgl.models.spec import LayerSpec
from minisgl.moe.block import MoeBlock


class ExpertsBesideLayer(NormAfterLayer):
    """A layer with experts beside its MLP.

    The experts and their router read the stream, each after a norm of its own. Norms follow the
    MLP and the experts, and another norm follows their sum.
    """

    def __init__(self, parts: ModelParts, spec: LayerSpec, name: str) -> None:
        super().__init__(parts, spec, name)
        config, comm, experts = parts.config, parts.comm, spec.beside
        assert experts is not None, "no experts; this is a bug"
        assert parts.moe_backend is not None, "sparse layers need a backend; this is a bug"
        size, offset = config.hidden_size, spec.norms.offset
        before, after = (size, config.stream_eps, comm), (size, config.norm_eps, comm, offset)
        # This norm replaces that of NormAfterLayer.
        self.post_feedforward_layernorm = CompleteNorm(*after)
        self.post_feedforward_layernorm_1 = ResidualNorm(*after)
        self.post_feedforward_layernorm_2 = ResidualNorm(*after)
        self.pre_feedforward_layernorm_2 = CompleteNorm(*before, offset)
        self.router = _RouterNorm(*before)
        linear = parts.linear._replace(parent=config.stored_name(name))
        self.experts = MoeBlock(size, experts, linear, parts.experts, parts.moe_backend)

    def _feed_forward(self, x: Tensor) -> Tensor:
        product = cast("DenseMlp", self.mlp).product(normed(self.pre_feedforward_layernorm, x))
        dense = self.post_feedforward_layernorm_1.of_sum(product).clone()
        stream = ResidualStream(x)
        block_input = self.pre_feedforward_layernorm_2.forward(stream)[0]
        router_input = self.router.forward(stream)[0].x
        product = self.experts.product(block_input, router_input)
        both = dense + self.post_feedforward_layernorm_2.of_sum(product)
        return self.post_feedforward_layernorm.forward(ResidualStream(both))[0].x


class _RouterNorm(CompleteNorm):
    """The norm before a router. The router divides its input by the square root of the width."""

    def placements(self, name: str) -> Iterator[Placement]:
        (weight,) = super().placements(name)
        yield weight._replace(source=f"{name}.scale", convert=_over_sqrt_of_width, constant=1.0)


def _over_sqrt_of_width(weight: Tensor) -> Tensor:
    return weight.float().div(math.sqrt(len(weight)))
