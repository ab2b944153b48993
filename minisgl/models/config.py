"""What a Hugging Face checkpoint says about its model, checked and with every default filled in.

Read as plain JSON. Whatever would change the output and is not supported is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.core import ConfigError
from minisgl.core.hub import read_json
from minisgl.layers import RopeScaling
from minisgl.models.fields import Fields
from minisgl.models.registry import Family, family_of
from minisgl.models.rope import rope_from

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """sparse_layers: which layers have experts; the others have a dense MLP."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    renormalise: bool
    sparse_layers: frozenset[int]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only model. dtype is the checkpoint's (float32, bfloat16 or float16).

    max_position    the context length in tokens, with what YaRN adds to it.
    sliding_window  tokens that some layer looks back at, where that is less than the context.
                    Not computed here, so it bounds the context that can be served.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    sliding_window: int | None
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied_embeddings: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    moe: MoeConfig | None
    sampling_defaults: dict[str, int | float]


def load_model_config(folder: str) -> ModelConfig:
    """Read config.json and, where there is one, generation_config.json. Raises ConfigError."""
    path = Path(folder)
    config = read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = read_json(generation_path) if generation_path.exists() else {}
    return model_config_from(config, generation)


def model_config_from(
    config: Mapping[str, Any], generation: Mapping[str, Any] | None = None
) -> ModelConfig:
    """Check and complete the JSON objects. Raises ConfigError that names what is wrong."""
    family = family_of(config.get("architectures"))
    fields = Fields({"sliding_window": family.default_window, **config})
    recommended = Fields(generation or {}, "generation_config.json")
    _refuse_unsupported(fields)
    vocab_size, hidden_size = fields.integer("vocab_size"), fields.integer("hidden_size")
    num_layers = fields.integer("num_hidden_layers")
    q_heads = fields.integer("num_attention_heads")
    kv_heads = fields.integer("num_key_value_heads", q_heads)
    if q_heads % kv_heads:
        raise ConfigError(f"{q_heads} attention heads do not divide over {kv_heads} KV heads")
    head_dim = fields.integer("head_dim", hidden_size // q_heads)
    if head_dim % 2:
        raise ConfigError(f"head_dim {head_dim} is odd; rotary embedding needs pairs")
    theta, scaling, max_position = rope_from(fields)
    window = _sliding_window(fields, family)
    attention_bias = family.reads_attention_bias and fields.boolean("attention_bias", False)
    return ModelConfig(
        family=family,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position=max_position,
        sliding_window=window if window is not None and window < max_position else None,
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family.always_qkv_bias or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family.reads_mlp_bias and fields.boolean("mlp_bias", False),
        tied_embeddings=fields.boolean("tie_word_embeddings", False),
        dtype=_dtype(fields),
        eos_token_ids=_eos_token_ids(vocab_size, fields, recommended),
        moe=_moe(fields, num_layers) if family.moe else None,
        sampling_defaults=_sampling_defaults(recommended),
    )


def _refuse_unsupported(fields: Fields) -> None:
    if fields.get("quantization_config") is not None:
        method = fields.mapping("quantization_config").get("quant_method", "unknown")
        raise ConfigError(
            f"quantization_config ({method}) is not supported; supported: unquantised weights"
        )
    activation = fields.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigError(f"hidden_act {activation!r} is not supported; supported: silu")
    layer_types = fields.get("layer_types")
    kinds = {str(kind) for kind in layer_types} if isinstance(layer_types, list) else set()
    if unknown := sorted(kinds - {"full_attention", "sliding_attention"}):
        raise ConfigError(f"layer type {unknown[0]!r} is not supported; supported: full_attention")


def _sliding_window(fields: Fields, family: Family) -> int | None:
    """The window of the layers that slide, None when no layer does."""
    if fields.get("sliding_window") is None:
        return None
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        slides = "sliding_attention" in layer_types
    elif family.default_window is not None:
        slides = True
    else:
        first = fields.number("max_window_layers", 28) if family.window_skips_layers else 0
        has_later = first < fields.integer("num_hidden_layers")
        slides = fields.boolean("use_sliding_window", False) and has_later
    return fields.integer("sliding_window") if slides else None


def _dtype(fields: Fields) -> str:
    name = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"dtype {name!r} of the checkpoint is not supported; "
            "supported: float32, bfloat16, float16"
        )
    return str(name)


def _moe(fields: Fields, num_layers: int) -> MoeConfig:
    # transformers 5 writes num_local_experts, older versions num_experts.
    key = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    dense = fields.integers("mlp_only_layers")
    step = fields.integer("decoder_sparse_step", 1)
    sparse = (i for i in range(num_layers) if (i + 1) % step == 0 and i not in dense)
    moe = MoeConfig(
        num_experts=fields.integer(key, 128),
        experts_per_token=fields.integer("num_experts_per_tok", 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        renormalise=fields.boolean("norm_topk_prob", False),
        sparse_layers=frozenset(sparse),
    )
    if moe.experts_per_token > moe.num_experts:
        raise ConfigError(
            f"num_experts_per_tok {moe.experts_per_token} exceeds {moe.num_experts} experts"
        )
    return moe


def _sampling_defaults(fields: Fields) -> dict[str, int | float]:
    """Parameters for requests that do not give them, where the author did.

    An explicit do_sample false means greedy, so temperature 0.
    """
    found: dict[str, int | float] = {
        name: fields.number(name) for name in _SAMPLING if fields.get(name) is not None
    }
    if "top_k" in found:
        found["top_k"] = int(found["top_k"])
    return found | ({"temperature": 0.0} if fields.get("do_sample") is False else {})


def _eos_token_ids(vocab_size: int, *files: Fields) -> tuple[int, ...]:
    """Of both files, sorted. An id that has no logit is never sampled: it ends nothing."""
    found = {item for file in files for item in file.integers("eos_token_id")}
    return tuple(sorted(item for item in found if 0 <= item < vocab_size))
