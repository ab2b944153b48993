"""One decoder layer: a mixer and an MLP on the residual stream."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple, cast

from torch import Tensor, nn

from minisgl.distributed.comm import Communicator
from minisgl.layers.attention import Attention, AttentionSpec
from minisgl.layers.delta import DeltaSpec, GatedDelta
from minisgl.layers.linear import LinearBuild, LinearMethod, LinearMethodFactory
from minisgl.layers.mamba import Mamba, MambaSpec
from minisgl.layers.mixer import ForwardContext, Mixer, MixerBuild
from minisgl.layers.mlp import DenseMlp
from minisgl.layers.norm import BlockInput, CompleteNorm, ResidualNorm, ResidualStream
from minisgl.models.spec import LayerSpec, MixerSpec, ModelSpec
from minisgl.moe.base import MoeBackend
from minisgl.moe.block import MoeBlock
from minisgl.moe.experts import ExpertsFactory
from minisgl.moe.spec import ExpertsSpec


class ModelParts(NamedTuple):
    """The values that all modules of a model share.

    comm         the collectives between the tensor-parallel ranks.
    linear       the dtype and the method of all linear layers.
    experts      stores the experts of sparse layers.
    moe_backend  computes the experts of sparse layers. May be None without such layers.
    draft_logits
                 as in Quantization.
    """

    config: ModelSpec
    comm: Communicator
    linear: LinearBuild
    experts: ExpertsFactory
    moe_backend: MoeBackend | None
    draft_logits: LinearMethodFactory | None


# The module of each kind of mixer.
MIXERS: Mapping[type[MixerSpec], type[Mixer]] = {
    AttentionSpec: Attention,
    DeltaSpec: GatedDelta,
    MambaSpec: Mamba,
}


class Attended(NamedTuple):
    """The output of a layer's attention before the output projection, with the residual stream.

    heads: [T, n], the mixed features, and after them the layer's input (LayerInputSpec), if it has
    one. residual: [T, H].
    """

    heads: Tensor
    residual: Tensor

    def take_rows(self, rows: Tensor, comm: Communicator) -> "Attended":
        """Return copies of the activations of B tokens. rows: integers [B], indices of the tokens.

        A rank may hold the complete sum of the residual stream for some tokens only. In the result
        every rank has the complete sum for all B tokens.
        """
        return Attended(self.heads[rows], comm.take_rows(self.residual, rows))


class DecoderLayer(nn.Module):
    """A mixer and, unless the spec has none, an MLP on the residual stream.

    A norm precedes each of the two.
    """

    def __init__(self, parts: ModelParts, spec: LayerSpec, name: str) -> None:
        """name: the full name of the layer, such as model.layers.0."""
        super().__init__()
        config, comm, size = parts.config, parts.comm, parts.config.hidden_size
        self.spec = spec
        norm = (size, config.stream_eps, comm, spec.norms.offset)
        self.input_layernorm = ResidualNorm(*norm)
        kind, stored = MIXERS[type(spec.mixer)], config.stored_name
        linear = parts.linear._replace(parent=stored(f"{name}.{kind.name}"))
        build = MixerBuild(size, config.norm_eps, config.ropes, comm, linear)
        self.mixer_name = kind.name
        self.add_module(kind.name, kind(spec.mixer, build))
        self.mlp: DenseMlp | MoeBlock | None = None
        if spec.mlp is None:
            return
        self.post_attention_layernorm = ResidualNorm(*norm)
        parent = stored(f"{name}.{spec.mlp.names.block}".rstrip("."))
        linear = parts.linear._replace(parent=parent)
        if isinstance(spec.mlp, ExpertsSpec):
            assert parts.moe_backend is not None, "sparse layers need a backend; this is a bug"
            self.mlp = MoeBlock(size, spec.mlp, linear, parts.experts, parts.moe_backend)
        else:
            self.mlp = DenseMlp(size, spec.mlp, linear)

    @property
    def mixer(self) -> Mixer:
        """The mixer, which has the name of its tensors in the checkpoint as a module."""
        return cast("Mixer", self._modules[self.mixer_name])

    @property
    def attended_width(self) -> int:
        """The number of features in Attended.heads."""
        return self.mixer.out.method.shards.inputs.local

    @property
    def ends_with_attention(self) -> bool:
        """Whether `attend` computes nothing after attention."""
        return self.mixer.ends_with_attention

    def attend(self, stream: ResidualStream, context: ForwardContext) -> Attended:
        """The first half of the layer: the norm and the mixer."""
        block_input, residual = self.input_layernorm(stream)
        return Attended(self.mixer.mix(block_input, context), residual)

    def project(self, attended: Attended) -> ResidualStream:
        """The second half of the layer: the projection, the norm and the MLP.

        Overwrites the residual.
        """
        stream: ResidualStream = self.mixer.out(*attended)
        del attended  # the MLP of a large step can use the memory of the heads
        if self.mlp is None:
            return stream
        block_input, residual = self.post_attention_layernorm(stream)
        out: ResidualStream = self.mlp(block_input, residual)
        return out

    def fold_norms(self, before: LinearMethod | None = None) -> LinearMethod | None:
        """Move the norms' weights into the blocks that read them, if these can take them.

        before: the method whose `add` gives the input of the layer, if there is one. Returns the
        method whose `add` gives the output of the layer, if there is one.
        """
        self.input_layernorm.fold_with(partial(self.mixer.fold, before=before))
        last = self.mixer.out.method
        if self.mlp is None:
            return last
        self.post_attention_layernorm.fold_with(partial(self.mlp.fold, before=last))
        return self.mlp.down_proj.method if isinstance(self.mlp, DenseMlp) else None

    def scale_outputs(self, factor: float) -> None:
        """Multiply the loaded weights of each block's last products by `factor`.

        Raises ConfigError if a method cannot scale its weights.
        """
        method = self.mixer.out.method
        method.scale_rows(0, method.shards.rows, factor)
        if self.mlp is not None:
            self.mlp.scale_outputs(factor)


class DeepStackLayer(DecoderLayer):
    """A layer whose input gets a part of the features of image tokens (Qwen3-VL)."""

    def attend(self, stream: ResidualStream, context: ForwardContext) -> Attended:
        images, tap = context.images, self.spec.tap
        # The stream is a sum over the ranks, and only rank 0 has features to add.
        if images is not None and tap is not None:
            x = stream.x.add_(images.part(tap, stream.x.shape[1]))
            stream = stream._replace(x=x, squares=None, scaled=None)
        return super().attend(stream, context)


class NormAfterLayer(DecoderLayer):
    """A mixer and an MLP on the residual stream, each before a norm of its own (OLMo 2, EXAONE 4).

    A further norm may precede each of the two (Gemma). Every rank holds the complete stream.
    """

    def __init__(self, parts: ModelParts, spec: LayerSpec, name: str) -> None:
        super().__init__(parts, spec, name)
        config, comm = parts.config, parts.comm
        size, norms = config.hidden_size, self.spec.norms
        # These norms replace those of DecoderLayer.
        after_eps = config.norm_eps if norms.after_eps is None else norms.after_eps
        self.post_attention_layernorm = ResidualNorm(size, after_eps, comm, norms.offset)
        self.post_feedforward_layernorm = ResidualNorm(size, after_eps, comm, norms.offset)
        if norms.before:
            eps = config.stream_eps
            self.input_layernorm = CompleteNorm(size, eps, comm, norms.offset)
            self.pre_feedforward_layernorm = CompleteNorm(size, eps, comm, norms.offset)
        else:
            self.register_module("input_layernorm", None)
            self.register_module("pre_feedforward_layernorm", None)

    def attend(self, stream: ResidualStream, context: ForwardContext) -> Attended:
        block_input = normed(self.input_layernorm, stream.x)
        return Attended(self.mixer.mix(block_input, context), stream.x)

    def project(self, attended: Attended) -> ResidualStream:
        product = self.mixer.out.method.product(attended.heads)
        x = attended.residual + self.post_attention_layernorm.of_sum(product)
        return ResidualStream(x + self._feed_forward(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        """The output of the MLP for the complete stream x [T, H], valid until the next sum."""
        block_input = normed(self.pre_feedforward_layernorm, x)
        product = cast("DenseMlp | MoeBlock", self.mlp).product(block_input)
        return self.post_feedforward_layernorm.of_sum(product)

    def fold_norms(self, before: LinearMethod | None = None) -> None:
        """Nothing is folded: each linear gets the complete and normalised stream."""

    def scale_outputs(self, factor: float) -> None:
        self.post_attention_layernorm.weight.mul_(factor)
        self.post_feedforward_layernorm.weight.mul_(factor)


def normed(norm: ResidualNorm | None, x: Tensor) -> BlockInput:
    """Return the input of a block: the stream x [T, H], after the norm if there is one."""
    return BlockInput(x) if norm is None else norm.forward(ResidualStream(x))[0]
