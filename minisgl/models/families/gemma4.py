"""The text of Gemma 4: two shapes of KV heads, norms before and after the blocks.

Layers with full attention have wider heads than those with a window, and may take their keys as
values. The queries are not divided by sqrt(head_dim). In 26B-A4B, experts stand beside the MLP. In
E2B and E4B, layers have inputs of their own, and the late layers read the keys and values of an
earlier layer.
"""

from typing import Annotated, Any

import msgspec

from minisgl.core import ConfigError
from minisgl.kernel.activation import Activation
from minisgl.layers.attention import AttentionSpec, QkNorm
from minisgl.models.compose import attention_layers, dense_layers, model_spec, windows_by_interval
from minisgl.models.families.gemma import embedding_factor
from minisgl.models.hf_config import Count, HfConfig, PartCount, Raw, check_supported, read_fields
from minisgl.models.rope import rope_of
from minisgl.models.spec import LayerInputSpec, ModelSpec, Multipliers, NormsSpec
from minisgl.moe.spec import ExpertNames, ExpertsSpec

UNIFIED_DEFAULTS: Raw = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
DEFAULTS: Raw = {
    **UNIFIED_DEFAULTS,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
_INTERVAL = 6
NoneOrMore = Annotated[int, msgspec.Meta(ge=0, le=10_000)]
_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1e6,
    },
}


class HfGemma4(msgspec.Struct, frozen=True):
    """The fields of config.json that only this family has.

    global_head_dim, num_global_key_value_heads: of the layers with full attention; the second only
    with attention_k_eq_v. transformers 5 writes them for each of these layers in per_layer_config.
    hidden_size_per_layer_input: the width of the inputs of layers (E2B, E4B); 0: they have none.
    num_kv_shared_layers: the last layers, each of which reads the keys and values of the last layer
    before them that has the same kind of attention. use_double_wide_mlp: their MLPs are twice as
    wide.
    """

    global_head_dim: Count = 512
    num_global_key_value_heads: Count | None = None
    per_layer_config: dict[str, dict[str, Any]] = {}
    attention_k_eq_v: bool = False
    hidden_size_per_layer_input: NoneOrMore = 0
    vocab_size_per_layer_input: Count = 262_144
    num_kv_shared_layers: NoneOrMore = 0
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False
    num_experts: PartCount = 128
    top_k_experts: Count = 8
    moe_intermediate_size: Count = 704


def spec(config: HfConfig, raw: Raw) -> ModelSpec:
    fields = read_fields(raw, HfGemma4, "config.json")
    # Only the tokens of images attend in both directions.
    directions = config.use_bidirectional_attention
    check_supported("use_bidirectional_attention", directions, [False, "vision"])
    config = msgspec.structs.replace(
        config,
        use_bidirectional_attention=False,
        rope_parameters=config.rope_parameters or _ROPES,
    )
    windows = windows_by_interval(config, _INTERVAL)
    windows[-1] = None  # transformers ignores layer_types here
    full = msgspec.structs.replace(config, **_full_heads(config, fields, windows))
    ropes = rope_of(config), rope_of(full)
    traits = {"qk_norm": QkNorm.PER_HEAD, "v_norm": True, "bias": config.attention_bias}
    layers = config.num_layers
    windowed = attention_layers(config, windows, [ropes[0].window] * layers, **traits)
    traits["keys_as_values"] = fields.attention_k_eq_v
    of_full = attention_layers(full, windows, [ropes[1].rope] * layers, **traits)
    mixers = [
        whole if window is None else narrow
        for window, whole, narrow in zip(windows, of_full, windowed, strict=True)
    ]
    first = layers - fields.num_kv_shared_layers
    mixers, mlps = _sharing(mixers, first), dense_layers(config)
    if fields.use_double_wide_mlp:
        mlps[first:] = [mlp._replace(inner=2 * mlp.inner) for mlp in mlps[first:]]
    norms, beside = NormsSpec(after=True, scaled=True), _experts(fields)
    model = model_spec(config, ropes[1], mixers, mlps, norms=norms, beside=beside)
    factors = Multipliers(embedding_factor(config.hidden_size, config), query=None)
    return _with_inputs(msgspec.structs.replace(model, multipliers=factors), config, fields)


def _sharing(mixers: list[AttentionSpec], first: int) -> list[AttentionSpec]:
    """Return the attention of each layer, where those from `first` on store no keys and values.

    Raises ConfigError if one of them finds no layer to read from.
    """
    own, found = mixers[: max(first, 0)], []
    sources = {mixer.rule: mixer.kv_layer for mixer in own}
    for layer, mixer in enumerate(mixers[len(own) :], start=len(own)):
        if mixer.rule not in sources:
            raise ConfigError(
                f"config.json: layer {layer} shares keys and values (num_kv_shared_layers), and no "
                "layer before the shared ones has the same kind of attention"
            )
        found.append(mixer._replace(kv_layer=sources[mixer.rule], stores=False))
    return [*own, *found]


def _with_inputs(model: ModelSpec, config: HfConfig, fields: HfGemma4) -> ModelSpec:
    """Return the model with the inputs of layers, if config.json has them. Raises ConfigError.

    The published checkpoints have keys and values of layers that share those of others.
    """
    shared = [i for i, mixer in enumerate(model.attention) if not mixer.stores]
    names = ("k_proj", "v_proj", "k_norm", "v_norm")
    unread = tuple(f"model.layers.{i}.self_attn.{name}." for i in shared for name in names)
    model = msgspec.structs.replace(model, unread=unread)
    width = fields.hidden_size_per_layer_input
    if not width:
        return model
    vocabulary = fields.vocab_size_per_layer_input
    check_supported("vocab_size_per_layer_input", vocabulary, [model.vocab_size])
    activation, factor = Activation.GELU, embedding_factor(width, config)
    layers = tuple(
        layer._replace(input=LayerInputSpec(index, width, activation, factor))
        for index, layer in enumerate(model.layers)
    )
    modules = {f"model.layers.{i}.layer_input": f"model.layers.{i}" for i in range(len(layers))}
    names_of_inputs = {"model.layer_inputs": "model", **modules}
    return msgspec.structs.replace(model, layers=layers, names=names_of_inputs)


def _full_heads(
    config: HfConfig, fields: HfGemma4, windows: list[int | None]
) -> dict[str, int | None]:
    """Return the fields of HfConfig for the heads of full attention. Raises ConfigError."""
    kv_heads = config.num_key_value_heads
    if fields.attention_k_eq_v:
        kv_heads = fields.num_global_key_value_heads or kv_heads
    heads = {"head_dim": fields.global_head_dim, "num_key_value_heads": kv_heads}
    if not fields.per_layer_config:
        return heads
    full = {str(layer) for layer, window in enumerate(windows) if window is None}
    given = [{**heads, **own} for own in fields.per_layer_config.values()]
    is_known = given[0].keys() == heads.keys() and all(own == given[0] for own in given)
    if full != fields.per_layer_config.keys() or not is_known:
        raise ConfigError(
            "per_layer_config in config.json is supported for head_dim and num_key_value_heads of "
            "all layers with full attention, with equal values"
        )
    return given[0]


def _experts(fields: HfGemma4) -> ExpertsSpec | None:
    """Return the experts beside each MLP; None without them."""
    if not fields.enable_moe_block:
        return None
    return ExpertsSpec(
        fields.num_experts,
        fields.top_k_experts,
        fields.moe_intermediate_size,
        renormalise=True,
        activation=Activation.GELU,
        factors=True,
        names=ExpertNames(block="", router="router.proj"),
    )
