"""The description of a model, from the JSON files of a Hugging Face checkpoint.

This module fills in all defaults and checks all values. It refuses a model with a setting that
minisgl does not support and that would change the output. The error names the setting.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from minisgl.attention.base import AttentionRule
from minisgl.core import ConfigError
from minisgl.core.files import read_json
from minisgl.kvcache.pool import KVSpec
from minisgl.layers.rotary import QueryScale, Rope
from minisgl.models.hf_config import (
    Count,
    HfConfig,
    HfGeneration,
    HfTokenizer,
    ModelSettings,
    PartCount,
    check_supported,
    read_fields,
)
from minisgl.models.registry import Family, family_of, text_part
from minisgl.models.rope import ropes_from

_DTYPES = ("float32", "bfloat16", "float16")
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
_SLIDING = "sliding_attention"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class LayerSpec(NamedTuple):
    """The attention of one decoder layer, and the state that it keeps for each token.

    rule      the kind of attention.
    rope      the index of the layer's rotary embedding in ModelConfig.ropes.
    kv        the state of one token: the KV heads of the whole model, in the checkpoint's dtype.
    kv_layer  the index of the layer's keys and values in the KV pool. Layers with the same index
              share them. Indices run from 0 without gaps.
    """

    rule: AttentionRule
    rope: int
    kv: KVSpec
    kv_layer: int


class Multipliers(NamedTuple):
    """Factors of a model (Granite, Gemma). All are 1 in other models.

    embedding  on the token embedding.
    query      on the queries, beyond the usual 1 / sqrt(head_dim).
    residual   on the output of each block.
    logits     the divisor of the logits.
    """

    embedding: float = 1.0
    query: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


class MoeConfig(msgspec.Struct, frozen=True):
    """The fields of config.json that describe a mixture of experts.

    norm_topk_prob: whether the routing weights of a token sum to 1.
    swiglu_alpha, swiglu_limit: the constants of the clamped SwiGLU of gpt-oss.
    shared_expert_intermediate_size: inner size of the expert of all tokens; 0: there is none.
    stacked: Family.stacked_experts.
    """

    num_experts: PartCount = 128
    num_experts_per_tok: Count = 8
    moe_intermediate_size: Count = 768
    shared_expert_intermediate_size: int = 0
    norm_topk_prob: bool = False
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    decoder_sparse_step: Count = 1
    mlp_only_layers: int | list[int] = []
    stacked: bool = False

    def has_experts(self, layer: int) -> bool:
        """Whether the MLP of this layer is a mixture of experts; otherwise it is dense."""
        sparse = (layer + 1) % self.decoder_sparse_step == 0
        return sparse and layer not in _as_list(self.mlp_only_layers)


class ModelConfig(ModelSettings, frozen=True, kw_only=True):
    """The description of one decoder-only model.

    layers          one LayerSpec for each of the num_layers decoder layers.
    max_position    the context length in tokens, after an extension by YaRN.
    activation      of the gate of a dense MLP: silu or gelu_pytorch_tanh.
    ropes           the rotary embeddings of the layers.
    query_scale     the factor on the queries of late positions, or None.
    dtype           the checkpoint's dtype: float32, bfloat16 or float16.
    """

    family: Family
    kv_heads: int
    head_dim: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    activation: str
    ropes: tuple[Rope, ...]
    query_scale: QueryScale | None
    multipliers: Multipliers
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None
    sampling_defaults: dict[str, int | float]

    @property
    def rules(self) -> tuple[AttentionRule, ...]:
        """The rule of each layer in the KV pool. Layers that share keys and values count once."""
        by_layer = {layer.kv_layer: layer.rule for layer in self.layers}
        return tuple(by_layer[index] for index in sorted(by_layer))

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
    def stream_eps(self) -> float:
        """The epsilon of the norms of the residual stream.

        The model leaves the embedding as it is and divides all that is added to it
        (CausalLM.fold_multipliers). A norm of the smaller stream gives the same result with a
        smaller epsilon.
        """
        return self.norm_eps / self.multipliers.embedding**2

    def for_context(self, length: int) -> "ModelConfig":
        """Return the model for contexts of at most `length` tokens.

        A window that holds every such context has no effect, and its layers have full attention.
        """
        layers = []
        for layer in self.layers:
            window = layer.rule.window
            if window is not None and window >= length:
                layer = layer._replace(rule=layer.rule._replace(window=None))
            layers.append(layer)
        return msgspec.structs.replace(self, layers=tuple(layers))


def load_model_config(folder: str) -> ModelConfig:
    """Read config.json and, if the folder has them, two other files. Raises ConfigError.

    generation_config.json: sampling defaults and end tokens; without it, tokenizer.json has the ids
    of the family's end tokens. hf_quant_config.json: quantisation by ModelOpt.
    """
    path = Path(folder)
    config = read_json(path / "config.json")
    modelopt = path / "hf_quant_config.json"
    if config.get("quantization_config") is None and modelopt.exists():
        settings = read_json(modelopt).get("quantization")
        settings = settings if isinstance(settings, dict) else {}
        config = {**config, "quantization_config": {"quant_method": "modelopt", **settings}}
    generation_path = path / "generation_config.json"
    if generation_path.exists():
        return model_config_from(config, read_json(generation_path))
    end_tokens = family_of(text_part(config).get("architectures")).end_tokens
    tokenizer = path / "tokenizer.json"
    if not end_tokens or not tokenizer.exists():
        return model_config_from(config)
    added = read_fields(read_json(tokenizer), HfTokenizer, tokenizer.name)
    return model_config_from(config, {"eos_token_id": added.ids_of(end_tokens)})


def model_config_from(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Check and complete the two JSON objects. Raises ConfigError that names the wrong field."""
    config = text_part(config)
    family = family_of(config.get("architectures"))
    config = {**family.defaults, **config}
    fields = read_fields(config, HfConfig, "config.json")
    activation = fields.hidden_activation or fields.hidden_act
    check_supported("hidden_act", activation, _ACTIVATIONS)
    if fields.use_bidirectional_attention:
        raise ConfigError("use_bidirectional_attention true is not supported: attention is causal")
    q_heads = fields.q_heads
    kv_heads = fields.num_key_value_heads or q_heads
    if q_heads % kv_heads:
        raise ConfigError(f"{q_heads} attention heads do not divide over {kv_heads} KV heads")
    head_dim = fields.head_dim or fields.hidden_size // q_heads
    if head_dim < 2 or head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is not even; rotary embedding needs pairs")
    full, window = ropes_from(fields, family, head_dim)
    dtype = fields.dtype or fields.torch_dtype or "float32"
    check_supported("the checkpoint's dtype", dtype, _DTYPES)
    recommended = read_fields(generation or {}, HfGeneration, "generation_config.json")
    attention_bias = family.reads_attention_bias and fields.attention_bias
    out_bias = fields.attention_out_bias
    kv = KVSpec(kv_heads, head_dim, getattr(torch, dtype))
    ropes, layers = _layers(fields, family, full.rope, window.rope, kv)
    return ModelConfig(
        **{name: getattr(fields, name) for name in ModelSettings.__struct_fields__},
        family=family,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=layers,
        max_position=full.max_position,
        activation=activation,
        ropes=ropes,
        query_scale=full.query_scale,
        multipliers=_multipliers(fields, family, head_dim, dtype),
        qkv_bias=family.always_qkv_bias or attention_bias,
        output_bias=attention_bias if out_bias is None else out_bias,
        mlp_bias=family.reads_mlp_bias and fields.mlp_bias,
        dtype=dtype,
        eos_token_ids=_eos_token_ids(fields, recommended),
        moe=_moe(config, family) if family.moe else None,
        sampling_defaults=_sampling_defaults(recommended),
    )


def _layers(
    fields: HfConfig, family: Family, full: Rope, window: Rope, kv: KVSpec
) -> tuple[tuple[Rope, ...], tuple[LayerSpec, ...]]:
    """Return the rotary embeddings of a model, and its layers. Raises ConfigError.

    full, window: the embeddings of layers with full attention, and of layers with a window. kv: the
    state of a token, the same for all layers.
    """
    count, interval = fields.num_layers, fields.no_rope_layer_interval
    windows = _windows(fields, family)
    rotates = [True] * count
    if family.no_rope_interval:
        rotates = [bool(value) for value in fields.no_rope_layers or ()]
        rotates = rotates or [(layer + 1) % interval != 0 for layer in range(count)]
        if len(rotates) != count:
            raise ConfigError(
                f"no_rope_layers in config.json has {len(rotates)} entries; expected {count}, one "
                "for each layer"
            )
    elif family.rope_in_windows_only and fields.sliding_window is not None:
        rotates = [size is not None for size in windows]
    of_layer = [full if size is None else window for size in windows]
    none, cap = Rope(full.theta, None, 0), fields.attn_logit_softcapping
    of_layer = [of_layer[i] if rotates[i] else none for i in range(count)]
    used = tuple(dict.fromkeys(of_layer))
    rules = [AttentionRule(size, cap, family.sinks) for size in windows]
    return used, tuple(LayerSpec(rules[i], used.index(of_layer[i]), kv, i) for i in range(count))


def _multipliers(fields: HfConfig, family: Family, head_dim: int, dtype: str) -> Multipliers:
    query, scalar = 1.0, fields.query_pre_attn_scalar
    if scalar is not None:
        query = math.sqrt(head_dim / scalar)
    if family.scaled_embedding:
        # The authors' code rounds the factor to the dtype of the embedding.
        factor = torch.tensor(fields.hidden_size**0.5).to(getattr(torch, dtype))
        return Multipliers(float(factor), query)
    if not family.multipliers:
        return Multipliers()
    if fields.attention_multiplier is not None:
        query = fields.attention_multiplier * math.sqrt(head_dim)
    return Multipliers(
        fields.embedding_multiplier, query, fields.residual_multiplier, fields.logits_scaling
    )


def _windows(fields: HfConfig, family: Family) -> list[int | None]:
    """Return the window of each layer in tokens; None: the layer has full attention.

    Raises ConfigError for a layer type that is neither full nor sliding attention.
    """
    count, window = fields.num_layers, fields.sliding_window
    pattern, kinds = fields.sliding_window_pattern, fields.layer_types
    interval = pattern if type(pattern) is int else family.full_interval
    if kinds is not None:
        for kind in kinds:
            check_supported("layer type", kind, ("full_attention", _SLIDING))
        if len(kinds) != count:
            raise ConfigError(f"layer_types in config.json has {len(kinds)} entries of {count}")
        slides = [kind == _SLIDING for kind in kinds]
    elif family.full_interval:
        if interval < 1:
            raise ConfigError(
                f"config.json: sliding_window_pattern is {interval}: expected 1 or more"
            )
        slides = [(layer + 1) % interval != 0 for layer in range(count)]
    elif family.has_window:
        slides = [True] * count
    else:
        first = fields.max_window_layers if family.window_skips_layers else 0
        slides = [fields.use_sliding_window and layer >= first for layer in range(count)]
    if window is None or not any(slides):
        return [None] * count
    if type(window) is not int or window < 1:
        raise ConfigError(f"config.json: sliding_window is {window!r}: expected an integer >= 1")
    return [window if sliding else None for sliding in slides]


def _moe(config: Mapping[str, Any], family: Family) -> MoeConfig:
    # transformers 5 writes num_local_experts, earlier versions num_experts.
    key = "num_local_experts" if config.get("num_experts") is None else "num_experts"
    settings = {**config, "num_experts": config.get(key), "stacked": family.stacked_experts}
    if not family.shared_expert:
        settings["shared_expert_intermediate_size"] = 0
    if family.stacked_experts:
        # A softmax over the chosen experts is a softmax over all, divided by the chosen sum.
        inner = config.get("intermediate_size")
        settings |= {"moe_intermediate_size": inner, "norm_topk_prob": True}
    moe = read_fields(settings, MoeConfig, "config.json")
    if moe.num_experts_per_tok > moe.num_experts:
        raise ConfigError(
            f"num_experts_per_tok {moe.num_experts_per_tok} exceeds {moe.num_experts} experts"
        )
    return moe


def _sampling_defaults(recommended: HfGeneration) -> dict[str, int | float]:
    """Return the parameters that the model's author recommends for requests without them.

    do_sample false means greedy decoding, which is temperature 0.
    """
    values = {name: getattr(recommended, name) for name in _SAMPLING}
    found: dict[str, int | float] = {name: x for name, x in values.items() if x is not None}
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return found | ({"temperature": 0.0} if recommended.do_sample is False else {})


def _eos_token_ids(config: HfConfig, generation: HfGeneration) -> tuple[int, ...]:
    """The end-of-sequence ids of both files, sorted.

    An id outside of the vocabulary is left out, because the sampler never returns it.
    """
    found = {*_as_list(config.eos_token_id), *_as_list(generation.eos_token_id)}
    return tuple(sorted(item for item in found if 0 <= item < config.vocab_size))


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]
