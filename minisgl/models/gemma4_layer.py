"""The decoder layers of Gemma 4: a scalar, an input of the layer, experts beside the MLP."""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from minisgl.layers.mixer import ForwardContext
from minisgl.layers.mlp import DenseMlp
from minisgl.layers.norm import CompleteNorm, ResidualNorm, ResidualStream
from minisgl.layers.shards import Placement
from minisgl.models.layer import Attended, ModelParts, NormAfterLayer, normed
from minisgl.models.layer_input import LayerInputBlock
from minisgl.models.spec import LayerSpec
from minisgl.moe.block import MoeBlock


class ScaledLayer(NormAfterLayer):
    """A layer with a scalar, and perhaps with an input of its own.

    layer_scalar: [1], as NormsSpec.scaled; None: no number multiplies the stream.
    layer_input: reads the input of the layer; None without one.
    """

    def __init__(self, parts: ModelParts, spec: LayerSpec, name: str) -> None:
        super().__init__(parts, spec, name)
        config, self.layer_input = parts.config, None
        self.layer_scalar = nn.Parameter(torch.empty(1)) if spec.norms.scaled else None
        if spec.input is not None:
            linear = parts.linear._replace(parent=config.stored_name(f"{name}.layer_input"))
            self.layer_input = LayerInputBlock(config, spec.input, parts.comm, linear)

    @property
    def attended_width(self) -> int:
        own = 0 if self.layer_input is None else self.layer_input.width
        return super().attended_width + own

    @property
    def ends_with_attention(self) -> bool:
        return super().ends_with_attention and self.layer_input is None

    def placements(self, name: str) -> Iterator[Placement]:
        if self.layer_scalar is not None:
            name = f"{name}.layer_scalar"
            yield Placement(name, (1,), name, constant=1.0)

    def attend(self, stream: ResidualStream, context: ForwardContext) -> Attended:
        heads, x = super().attend(stream, context)
        if context.inputs is not None and self.spec.input is not None:
            heads = torch.cat((heads, context.inputs[self.spec.input.layer]), dim=1)
        return Attended(heads, x)

    def project(self, attended: Attended) -> ResidualStream:
        heads = attended.heads[:, : super().attended_width].contiguous()
        x = super().project(Attended(heads, attended.residual)).x
        if self.layer_input is not None:
            x = x + self.layer_input(x, attended.heads[:, heads.shape[1] :])
        return ResidualStream(x if self.layer_scalar is None else x.mul_(self.layer_scalar))

    def scale_outputs(self, factor: float) -> None:
        super().scale_outputs(factor)
        if self.layer_input is not None:
            self.layer_input.post_per_layer_input_norm.weight.mul_(factor)


class ExpertsBesideLayer(ScaledLayer):
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
