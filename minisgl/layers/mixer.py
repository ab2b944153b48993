"""The interface between a decoder layer and the module that mixes its tokens, such as attention."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor, nn

from minisgl.attention.base import StepAttention
from minisgl.core import ConfigError
from minisgl.distributed.comm import Communicator
from minisgl.kernel.states import StateStep
from minisgl.kvcache.pool import KVPool
from minisgl.layers.images import ImageFeatures
from minisgl.layers.linear import LinearBuild, LinearMethod, RowParallelLinear
from minisgl.layers.norm import BlockInput
from minisgl.layers.rotary import Rope


class ForwardContext(NamedTuple):
    """The inputs that all layers of one forward share.

    positions    int32 [T], the row of each token in the rotary tables. This is the position in its
                 request, unless the request has images (layers.images.MixedAngles).
    slots        int32 [T] for each pool: the slot of each token's keys and values.
    ropes        float32 [max_seq_len, D], the rotary tables of ModelSpec.ropes.
    pools        the KV pools of ModelSpec.pools.
    attention    the attention of this step over the pools.
    query_scale  float32 [T, 1], the factor on the queries of each token; None: no factor.
    states       the memory of each layer with a recurrent state, by StateSpec.layer.
    state_step   the requests of this step, for these layers; None without such layers.
    images       None for a model without DeepStack, and if the step has no image tokens.
    inputs       [layers, T, n], this rank's share of the input of each layer (LayerInputSpec); None
                 for layers without one.
    """

    positions: Tensor
    slots: Sequence[Tensor]
    ropes: tuple[Tensor, ...]
    pools: tuple[KVPool, ...]
    attention: StepAttention
    query_scale: Tensor | None = None
    states: Sequence[Any] = ()
    state_step: StateStep | None = None
    images: ImageFeatures | None = None
    inputs: Tensor | None = None


class MixerBuild(NamedTuple):
    """The values that a mixer gets besides its spec.

    size    the width of the residual stream, H.
    eps     the epsilon of the mixer's own norms.
    ropes   the rotary embeddings of the model. ForwardContext has their tables in this order.
    linear  its parent is the full name of the mixer in the checkpoint.
    """

    size: int
    eps: float
    ropes: tuple[Rope, ...]
    comm: Communicator
    linear: LinearBuild


class Mixer(nn.Module, ABC):
    """The part of a decoder layer in which a token reads other tokens of its request.

    The constructor takes the spec of the layer's mixer and a MixerBuild.

    name: the name of the module in a layer of the checkpoint.
    out: the projection of n mixed features to the residual stream. The decoder layer applies it.
    """

    name: ClassVar[str]
    out: RowParallelLinear

    @property
    @abstractmethod
    def kind(self) -> Hashable:
        """The part of the spec that selects kernels: equal for layers that launch the same."""

    def state(self, pools: Sequence[KVPool], states: Sequence[Any]) -> Iterator[Tensor | None]:
        """Yield the tensors in which the mixer keeps the state of tokens; None: an optional one.

        pools, states: as in ForwardContext.
        """
        yield from ()

    @property
    def ends_with_attention(self) -> bool:
        """Whether `mix` returns the output of attention itself, and computes nothing after it."""
        return False

    @abstractmethod
    def mix(self, block_input: BlockInput, context: ForwardContext) -> Tensor:
        """Mix the T tokens, and keep their state for later steps. Returns [T, n]."""

    def fold(self, norm_weight: Tensor, before: LinearMethod | None = None) -> bool:
        """Take over the weight [H] of the norm before the mixer, as LinearMethod.fold."""
        return False

    def scale_queries(self, factor: float | None) -> None:
        """Multiply the queries by `factor`, in the loaded weights. Raises ConfigError.

        None: undo the division of the scores by sqrt(head_dim).
        """
        raise ConfigError(f"{type(self).__name__} has no queries to multiply by {factor}")
