"""Model folders for benchmarks with random weights: a config and a tokenizer, but no weights."""

import itertools
import json
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.numpy import save_file

from minisgl.core import ConfigError

_COMMON: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


def _shape(
    hidden_size: int, layers: int, heads: int, intermediate_size: int, tied: bool
) -> dict[str, Any]:
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate_size,
        "tie_word_embeddings": tied,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    kinds = ["sliding_attention", "full_attention"]
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
    return _shape(2880, layers, 64, 2880, tied=False) | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000,
        "rope_scaling": yarn | {"original_max_position_embeddings": 4096, "truncate": False},
        "max_position_embeddings": 131072,
        "sliding_window": 128,
        "layer_types": kinds * (layers // 2),
        "attention_bias": True,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
        "eos_token_id": 200002,
    }


def _hybrid(
    kind: str, hidden_size: int, layers: int, heads: int, inner: int, kv: int, values: int
) -> dict[str, Any]:
    """Three of four layers are gated delta nets. values: their value heads; kv: KV heads."""
    return _shape(hidden_size, layers, heads, inner, tied=False) | {
        "architectures": [f"{kind}ForCausalLM"],
        "num_key_value_heads": kv,
        "head_dim": 256,
        "linear_num_value_heads": values,
        "vocab_size": 248320,
        "eos_token_id": 248044,
        "rope_theta": 10_000_000,
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
    }


def _granite_4(
    hidden_size: int, heads: int, kv: int, shared: int, logits: float, moe: dict[str, int]
) -> dict[str, Any]:
    """Attention in four of 40 layers. shared: the inner size of the MLP of all tokens."""
    kinds = (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4
    return _shape(hidden_size, 40, heads, moe.get("intermediate_size", shared), tied=True) | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_key_value_heads": kv,
        "head_dim": hidden_size // heads,
        "vocab_size": 100352,
        "eos_token_id": 100257,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "position_embedding_type": "nope",
        "layer_types": kinds,
        "mamba_n_heads": hidden_size // 32,
        "mamba_d_state": 128,
        "shared_intermediate_size": shared,
        "num_local_experts": 0,
        "embedding_multiplier": 12.0,
        "attention_multiplier": heads / hidden_size,
        "residual_multiplier": 0.22,
        "logits_scaling": logits,
        **moe,
    }


def _gemma_4(
    hidden_size: int, layers: int, heads: int, inner: int, kv: int, full_kv: int
) -> dict[str, Any]:
    """kv: KV heads of layers with a window. full_kv: those of layers with full attention."""
    return _shape(hidden_size, layers, heads, inner, tied=True) | {
        "architectures": ["Gemma4ForCausalLM"],
        "hidden_activation": "gelu_pytorch_tanh",
        "num_key_value_heads": kv,
        "num_global_key_value_heads": full_kv,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 262144,
        "sliding_window": 1024,
        "final_logit_softcapping": 30.0,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "eos_token_id": 1,
    }


def _gemma_4_e(
    hidden_size: int, layers: int, inner: int, kv: int, interval: int, shared: int, doubled: bool
) -> dict[str, Any]:
    """interval: of layers with full attention. shared: layers without keys and values."""
    kinds = ["sliding_attention"] * (interval - 1) + ["full_attention"]
    return _gemma_4(hidden_size, layers, 8, inner, kv=kv, full_kv=kv) | {
        "layer_types": kinds * (layers // interval),
        "sliding_window": 512,
        "max_position_embeddings": 131072,
        "attention_k_eq_v": False,
        "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": doubled,
    }


def _nemotron_3(hidden_size: int, inner: int, experts: int, pattern: str) -> dict[str, Any]:
    """inner: of an expert; the shared expert is twice as wide. pattern: a letter for each layer."""
    return _shape(hidden_size, len(pattern), 32, inner, tied=False) | {
        "architectures": ["NemotronHForCausalLM"],
        "num_key_value_heads": 2,
        "vocab_size": 131072,
        "eos_token_id": 11,
        "max_position_embeddings": 262144,
        "hybrid_override_pattern": pattern,
        "mamba_num_heads": 64,
        "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": 2 * inner,
        "n_routed_experts": experts,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
    }


def _with_encoder(
    shape: dict[str, Any], language_model: str, architecture: str, taps: list[int]
) -> dict[str, Any]:
    """Add the image encoder. language_model: its model_type. taps: blocks with DeepStack."""
    vision = {"out_hidden_size": shape["hidden_size"], "deepstack_visual_indexes": taps}
    return shape | {
        "architectures": [f"{architecture}ForConditionalGeneration"],
        "text_config": {"model_type": language_model},
        "vision_config": vision,
        "image_token_id": (_COMMON | shape)["vocab_size"] - 1,
    }


# Published shapes.
SHAPES = {
    "qwen3-0.6b": _shape(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _shape(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _shape(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _shape(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _shape(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _shape(5120, 64, 64, 25600, tied=False),
    "qwen3-30b-a3b": _shape(2048, 48, 32, 6144, tied=False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "qwen3-vl-8b": _shape(4096, 36, 32, 12288, tied=False)
    | {"architectures": ["Qwen3VLTextModel"], "rope_theta": 5_000_000}
    | {"max_position_embeddings": 262144},
    "qwen3-vl-30b-a3b": _shape(2048, 48, 32, 6144, tied=False)
    | {"architectures": ["Qwen3VLMoeTextModel"], "num_key_value_heads": 4, "num_experts": 128}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "rope_theta": 5_000_000}
    | {"max_position_embeddings": 262144},
    "glm-4.5-air": _shape(4096, 46, 96, 10944, tied=False)
    | {"architectures": ["Glm4MoeForCausalLM"], "vocab_size": 151552, "eos_token_id": 151329}
    | {"n_routed_experts": 128, "moe_intermediate_size": 1408, "max_position_embeddings": 131072}
    | {"attention_bias": True},
    "minimax-m2": _shape(3072, 62, 48, 1536, tied=False)
    | {"architectures": ["MiniMaxM2ForCausalLM"], "vocab_size": 200064, "eos_token_id": 200020}
    | {"num_local_experts": 256, "rotary_dim": 64, "rope_theta": 5_000_000}
    | {"max_position_embeddings": 196608},
    "muse-glimmer-30b": _shape(6656, 52, 32, 19968, tied=False)
    | {"architectures": ["MuseGlimmerTextModel"], "num_key_value_heads": 2, "vocab_size": 202048}
    | {"rope_theta": 10_000, "max_position_embeddings": 131072, "eos_token_id": 200001},
    "phi-4": _shape(5120, 40, 40, 17920, tied=False)
    | {"architectures": ["Phi3ForCausalLM"], "num_key_value_heads": 10, "vocab_size": 100352},
    "mistral-small-24b": _shape(5120, 40, 32, 32768, tied=False)
    | {"architectures": ["MistralForCausalLM"], "vocab_size": 131072},
    "ministral-3-8b": _shape(4096, 34, 32, 14336, tied=False)
    | {"architectures": ["Ministral3ForCausalLM"], "vocab_size": 131072},
    "granite-3-8b": _shape(4096, 40, 32, 12800, tied=True)
    | {"architectures": ["GraniteForCausalLM"], "vocab_size": 49159}
    | {"embedding_multiplier": 12.0, "attention_multiplier": 0.0078125}
    | {"residual_multiplier": 0.22, "logits_scaling": 16.0},
    "smollm3-3b": _shape(2048, 36, 16, 11008, tied=True)
    | {"architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 4, "vocab_size": 128256},
    "olmo2-7b": _shape(4096, 32, 32, 11008, tied=False)
    | {"architectures": ["Olmo2ForCausalLM"], "num_key_value_heads": 32, "vocab_size": 100352},
    "seed-oss-36b": _shape(5120, 64, 80, 27648, tied=False)
    | {"architectures": ["SeedOssForCausalLM"], "attention_bias": True}
    | {"attention_out_bias": False, "vocab_size": 155136},
    "gemma-3-12b": _shape(3840, 48, 16, 15360, tied=True)
    | {"architectures": ["Gemma3ForCausalLM"], "head_dim": 256, "vocab_size": 262208}
    | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256}
    | {"sliding_window": 1024, "sliding_window_pattern": 6, "max_position_embeddings": 131072}
    | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_local_base_freq": 10_000},
    "gemma-4-e2b": _gemma_4_e(1536, 35, 6144, 1, 5, 20, doubled=True),
    "gemma-4-e4b": _gemma_4_e(2560, 42, 10240, 2, 6, 18, doubled=False),
    "gemma-4-31b": _gemma_4(5376, 60, 32, 21504, kv=16, full_kv=4),
    "gemma-4-26b-a4b": _gemma_4(2816, 30, 16, 2112, kv=8, full_kv=2)
    | {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8}
    | {"moe_intermediate_size": 704},
    "qwen1.5-moe-a2.7b": _shape(2048, 24, 16, 5632, tied=False)
    | {"architectures": ["Qwen2MoeForCausalLM"], "num_key_value_heads": 16, "num_experts": 60}
    | {"num_experts_per_tok": 4, "moe_intermediate_size": 1408}
    | {"shared_expert_intermediate_size": 5632},
    "qwen3.5-9b": _hybrid("Qwen3_5", 4096, 32, 16, 12288, kv=4, values=32),
    "qwen3.6-27b": _hybrid("Qwen3_5", 5120, 64, 24, 17408, kv=4, values=48),
    "qwen3.6-35b-a3b": _hybrid("Qwen3_5Moe", 2048, 40, 16, 512, kv=2, values=32),
    "qwen3-next-80b-a3b": _hybrid("Qwen3Next", 2048, 48, 16, 5120, kv=2, values=32)
    | {"vocab_size": 151936, "eos_token_id": 151645},
    "granite-4.0-h-micro": _granite_4(2048, 32, 8, 8192, 8.0, {}),
    "granite-4.0-h-tiny": _granite_4(
        *(1536, 12, 4, 1024, 6.0),
        {"num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512},
    ),
    "granite-4.0-h-small": _granite_4(
        *(4096, 32, 8, 1536, 16.0),
        {"num_local_experts": 72, "num_experts_per_tok": 10, "intermediate_size": 768},
    ),
    "nemotron-3-nano-30b-a3b": _nemotron_3(
        *(2688, 1856, 128), "MEMEM*E" + 4 * "MEMEM*E" + "MEMEMEM*E" + "MEMEMEME"
    ),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
# Shapes with an image encoder: the arguments of _with_encoder.
_ENCODERS: dict[str, tuple[str, str, list[int]]] = {
    "qwen3.5-9b": ("qwen3_5_text", "Qwen3_5", []),
    "qwen3.6-27b": ("qwen3_5_text", "Qwen3_5", []),
    "qwen3.6-35b-a3b": ("qwen3_5_moe_text", "Qwen3_5Moe", []),
    "qwen3-vl-8b": ("qwen3_vl_text", "Qwen3VL", [8, 16, 24]),
}
SHAPES |= {
    f"{name}-images": _with_encoder(SHAPES[name], *encoder) for name, encoder in _ENCODERS.items()
}
_IMAGE = "<|image_pad|>"
# Renders the texts and images of a chat, one after the other.
_TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ '" + _IMAGE + "' if part.type == 'image' "
    "else part.text }}{% endfor %}{% endif %}{% endfor %}"
)


def write_model(name: str, folder: Path, full_vocabulary: bool = False) -> str:
    """Write the files of the model `name` to `folder`, and return the folder.

    The folder gets a checkpoint without tensors, because the engine refuses a folder without one.
    full_vocabulary: True gives every id a text, so that a server sends an event for every token;
    False builds a tokenizer of single bytes. A model with images also gets the last id as the image
    token, and a chat template. Raises ConfigError for an unknown name.
    """
    if name not in SHAPES:
        raise ConfigError(f"benchmark model {name!r} is not known; known: {', '.join(SHAPES)}")
    folder.mkdir(parents=True, exist_ok=True)
    config = _COMMON | SHAPES[name]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file({}, folder / "model.safetensors")
    vocab_size = config["vocab_size"]
    merges = list(itertools.islice(_merges(), vocab_size if full_vocabulary else 0))
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    image_token = config.get("image_token_id")
    texts = [*alphabet, *(left + right for left, right in merges)][: image_token or vocab_size]
    vocab = {text: index for index, text in enumerate(texts)}
    merges = merges[: len(vocab) - len(alphabet)]
    if image_token is not None:
        vocab[_IMAGE] = image_token
        (folder / "chat_template.jinja").write_text(_TEMPLATE, encoding="utf-8")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    if image_token is not None:
        tokenizer.add_special_tokens([_IMAGE])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


def _merges() -> Iterator[tuple[str, str]]:
    """Yield merges that build words of two characters, of three and so on."""
    words = ["Ġ", *string.ascii_lowercase]
    while True:
        words = [pair[0] + pair[1] for pair in itertools.product(words, string.ascii_lowercase)]
        for word in words:
            yield word[:-1], word[-1]
