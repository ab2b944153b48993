"""The description of a model: one spec for each layer, and the values that all layers share."""

from typing import NamedTuple

import msgspec

from minisgl.attention.base import AttentionRule
from minisgl.distributed.comm import TPInfo
from minisgl.kernel.activation import Activation
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.attention import AttentionSpec
from minisgl.layers.delta import DeltaSpec
from minisgl.layers.hidden import HiddenSpec
from minisgl.layers.mamba import MambaSpec
from minisgl.layers.mlp import DenseSpec
from minisgl.layers.rotary import QueryScale, Rope
from minisgl.layers.shards import Shard, split_evenly
from minisgl.layers.states import StateSpec
from minisgl.models.encoder_spec import EncoderSpec
from minisgl.models.hf_config import ModelSettings
from minisgl.moe.spec import ExpertsSpec

# The description of the part of a layer in which a token reads others. layer.MIXERS has the
# module of each.
MixerSpec = AttentionSpec | DeltaSpec | MambaSpec


class NormsSpec(NamedTuple):
    """The norms of a layer around its mixer and around its MLP.

    before  a norm of the input of each.
    after   a norm of the output of each, before it joins the residual stream.
    offset  the checkpoint stores weight - 1.
    after_eps
            the epsilon of the norms of outputs; None: that of the model.
    scaled  a number of the checkpoint, layer_scalar, multiplies the stream after the layer.
    """

    before: bool = True
    after: bool = False
    offset: bool = False
    after_eps: float | None = None
    scaled: bool = False


class LayerInputSpec(NamedTuple):
    """The input of a layer beside the stream (layer_input.py). Those of all layers are equal but
    for `layer`.

    layer       the index of the layer.
    width       the elements of the input for a token.
    activation  of the gate.
    embedding_factor
                on the rows of the embedding of inputs.
    """

    layer: int
    width: int
    activation: Activation
    embedding_factor: float

    def share(self, tp: TPInfo) -> Shard:
        """Return a rank's share of the elements."""
        return split_evenly("", self.width, tp.rank, tp.size)


class LayerSpec(NamedTuple):
    """One decoder layer.

    mlp     None: the layer ends with the mixer.
    tap     the part of an image token's features that joins the stream before the layer
            (DeepStack); 0 is the embedding. None: no part.
    beside  experts that compute the same stream as the MLP, between norms of their own (Gemma 4).
    input   None: the layer has no input beside the stream.
    """

    mixer: MixerSpec
    mlp: DenseSpec | ExpertsSpec | None
    norms: NormsSpec = NormsSpec()
    tap: int | None = None
    beside: ExpertsSpec | None = None
    input: LayerInputSpec | None = None

    @property
    def mlps(self) -> tuple[DenseSpec | ExpertsSpec, ...]:
        return tuple(mlp for mlp in (self.mlp, self.beside) if mlp is not None)


class Multipliers(NamedTuple):
    """Factors of a model (Granite, Gemma). All are 1 in other models.

    embedding  on the token embedding.
    query      on the queries, beyond the usual 1 / sqrt(head_dim). None: instead of it.
    residual   on the output of each block.
    logits     the divisor of the logits.
    """

    embedding: float = 1.0
    query: float | None = 1.0
    residual: float = 1.0
    logits: float = 1.0


class ModelSpec(ModelSettings, frozen=True, kw_only=True):
    """The description of one decoder-only model.

    max_position    the context length in tokens, after an extension by YaRN.
    query_scale     the factor on the queries of late positions, or None.
    dtype           the checkpoint's dtype: float32, bfloat16 or float16.
    eos_token_ids   tokens that end an answer, sorted.
    end_texts       special tokens that end an answer too, if the model folder has no
                    generation_config.json.
    draft_head      the layer of the draft head (models/mtp.py), which has attention. None: the
                    model has none, or does not use it.
    norm_offset     the checkpoint stores weight - 1 of the final norm.
    embedding_norm  a norm without weights follows the token embedding.
    unread          beginnings of the names of tensors that a checkpoint may have and that the model
                    does not read, such as those of a draft head. Each ends with a dot.
    encoder         the image encoder. None: the model has none, or does not use it.
    names           the checkpoint's names of modules, by their names in models/decoder.py. The
                    names of all other modules are equal.
    """

    layers: tuple[LayerSpec, ...]
    max_position: int
    query_scale: QueryScale | None
    multipliers: Multipliers = Multipliers()
    dtype: str
    eos_token_ids: tuple[int, ...]
    end_texts: tuple[str, ...]
    draft_head: LayerSpec | None = None
    norm_offset: bool = False
    embedding_norm: bool = False
    unread: tuple[str, ...] = ()
    encoder: EncoderSpec | None = None
    names: dict[str, str] = {}
    sampling_defaults: dict[str, int | float] = {}

    @property
    def largest_span(self) -> int:
        """As EncoderSpec; 1 without an image encoder."""
        return 1 if self.encoder is None else self.encoder.largest_span

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> tuple[AttentionSpec, ...]:
        """The layers with attention, without the draft head. All have the same query heads."""
        mixers = [layer.mixer for layer in self.layers]
        return tuple(mixer for mixer in mixers if isinstance(mixer, AttentionSpec))

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """The recurrent states of layers and of the draft head, by StateSpec.layer."""
        mixers = [layer.mixer for layer in self.layers]
        found = tuple(mixer for mixer in mixers if isinstance(mixer, StateSpec))
        if self.draft_head is None:
            return found
        return (*found, HiddenSpec(self.hidden_size, len(found)))

    @property
    def q_heads(self) -> int:
        return self.attention[0].q_heads

    @property
    def experts(self) -> tuple[ExpertsSpec, ...]:
        """The layers with a mixture of experts."""
        mlps = [mlp for layer in self.layers for mlp in layer.mlps]
        return tuple(mlp for mlp in mlps if isinstance(mlp, ExpertsSpec))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embeddings of the layers."""
        return tuple(self.rope_widths)

    @property
    def rope_widths(self) -> dict[Rope, int]:
        """The elements of the heads of each rotary embedding."""
        return {mixer.rope: mixer.kv.head_dim for mixer in self.attention}

    @property
    def kv_layers(self) -> tuple[AttentionSpec, ...]:
        """The layers in the KV pools, by kv_layer. Of layers that share one, the first counts."""
        drafting = [] if self.draft_head is None else [self.draft_head.mixer]
        mixers = [*self.attention, *(m for m in drafting if isinstance(m, AttentionSpec))]
        by_layer = {mixer.kv_layer: mixer for mixer in reversed(mixers)}
        return tuple(by_layer[index] for index in sorted(by_layer))

    @property
    def rules(self) -> tuple[AttentionRule, ...]:
        """The rule of each layer in the KV pools."""
        return tuple(mixer.rule for mixer in self.kv_layers)

    @property
    def window(self) -> int | None:
        """The largest window of a layer in tokens; None if all layers have full attention."""
        return max((rule.window for rule in self.rules if rule.window is not None), default=None)

    @property
    def pools(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each KV pool: those with full attention, and window layers if any."""
        full = tuple(i for i, rule in enumerate(self.rules) if rule.window is None)
        if self.window is None:
            return (full,)
        return full, tuple(i for i, rule in enumerate(self.rules) if rule.window is not None)

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """The state of a token in a layer of each KV pool, with the heads of the whole model."""
        layers = self.kv_layers
        # The first pool is empty if all layers have windows.
        return tuple(layers[pool[0] if pool else 0].kv for pool in self.pools)

    @property
    def stream_eps(self) -> float:
        """The epsilon of the norms of the residual stream.

        The model leaves the embedding as it is and divides all that is added to it
        (CausalLM.fold_multipliers). A norm of the smaller stream gives the same result with a
        smaller epsilon.
        """
        return self.norm_eps / self.multipliers.embedding**2

    def stored_name(self, name: str) -> str:
        """Return the checkpoint's name of a module or parameter. See `names`."""
        module, rest = name, ""
        while module and module not in self.names:
            module, dot, last = module.rpartition(".")
            rest = f"{dot}{last}{rest}"
        return self.names.get(module, "") + rest

    def without_drafts(self) -> "ModelSpec":
        """Return the model without its draft head. It does not read the tensors of the head."""
        if self.draft_head is None:
            return self
        return msgspec.structs.replace(self, draft_head=None, unread=(*self.unread, "mtp."))

    def for_context(self, length: int) -> "ModelSpec":
        """Return the model for contexts of at most `length` tokens.

        A window that holds every such context has no effect, and its layers have full attention.
        Layers of another shape than those with full attention keep a window, of `length` tokens.
        """
        layers, full = [], {each.kv for each in self.attention if each.rule.window is None}
        for layer in self.layers:
            mixer = layer.mixer
            if isinstance(mixer, AttentionSpec) and (mixer.rule.window or 0) >= length:
                window = None if full <= {mixer.kv} else length
                mixer = mixer._replace(rule=mixer.rule._replace(window=window))
            layers.append(layer._replace(mixer=mixer))
        return msgspec.structs.replace(self, layers=tuple(layers))
