"""Tiny models with FP8 weights in the formats of published checkpoints, and their references.

The reference of a model is a float32 checkpoint of the same, dequantised, weights. transformers
runs it. The code here that dequantises is independent of minisgl's.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

__all__ = ["FAMILIES", "FORMATS", "Saved", "build_fp8"]

_BASE: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 256,
    "intermediate_size": 384,  # 3 blocks of 128: with two ranks a block is split
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
_HYBRID = _BASE | {
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**_BASE),
    "llama-odd": lambda: transformers.LlamaConfig(**_BASE | {"intermediate_size": 330}),
    "qwen3": lambda: transformers.Qwen3Config(**_BASE),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(**_BASE | _EXPERTS),
    "phi3": lambda: transformers.Phi3Config(
        **_BASE | {"pad_token_id": 0, "partial_rotary_factor": 0.5}
    ),
    "granite": lambda: transformers.GraniteConfig(
        **_BASE
        | {"embedding_multiplier": 12.0, "attention_multiplier": 0.1}
        | {"residual_multiplier": 0.22, "logits_scaling": 0.25}
    ),
    "olmo2": lambda: transformers.Olmo2Config(**_BASE),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **_BASE | _EXPERTS | {"shared_expert_intermediate_size": 768}
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_HYBRID),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_HYBRID | {"mlp_only_layers": [0, 1, 2, 3]}
    ),
    "ministral3": lambda: transformers.Ministral3Config(**_BASE | {"head_dim": 32}),
}
_IGNORED = "model.layers.1.self_attn.o_proj"
_QUANTISED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight", "in_proj_qkvz.weight")
_DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


def _scheme(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": _DYNAMIC}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", r"re:.*mlp\.gate$", r"re:.*layers\.1\.self_attn\.o_proj"],
        "kv_cache_scheme": None,
    }


_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
# The settings of each format, the part of a weight with one scale, and the name of the scales.
FORMATS: dict[str, tuple[dict[str, Any], str, str]] = {
    "block": (
        _BLOCKS | {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head", _IGNORED]},
        "block",
        "weight_scale_inv",
    ),
    "block-ignored-layers": (
        _BLOCKS | {"ignored_layers": ["lm_head", _IGNORED]},
        "block",
        "weight_scale_inv",
    ),
    "tensor": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [_IGNORED]},
        "tensor",
        "weight_scale",
    ),
    "tensor-transformers": (  # Ministral-3-*-Instruct
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "weight_block_size": None,
            "modules_to_not_convert": ["lm_head", _IGNORED],
        },
        "tensor",
        "weight_scale_inv",
    ),
    "compressed-channel": (_scheme("channel"), "channel", "weight_scale"),
    "compressed-tensor": (_scheme("tensor"), "tensor", "weight_scale"),
    "compressed-block": (
        _scheme("block", block_structure=[128, 128]),
        "block",
        "weight_scale",
    ),
    "fbgemm": (
        {
            "quant_method": "fbgemm_fp8",
            "activation_scale_ub": 1200.0,
            "modules_to_not_convert": [_IGNORED],
        },
        "channel",
        "weight_scale",
    ),
    "modelopt": (
        {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head", "*layers.1*o_proj"],
        },
        "tensor",
        "weight_scale",
    ),
}


class Saved:
    """fp8: the folder of the FP8 checkpoint. reference: that of the dequantised weights."""

    def __init__(self, folder: Path) -> None:
        self.fp8, self.reference = str(folder / "fp8"), str(folder / "reference")


def build_fp8(form: str, family: str, folder: Path) -> Saved:
    """Save a random model in one format, with activation scales that minisgl does not read.

    Its KV scales and input scales differ from 1, so that a model that used them would differ.
    """
    saved = Saved(folder / f"{form}-{family}")
    if Path(saved.fp8).exists():
        return saved
    torch.manual_seed(0)
    config = FAMILIES[family]()
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(saved.reference)
    path = Path(saved.reference) / "model.safetensors"
    tensors = load_file(path)
    settings, part, scale_name = FORMATS[form]
    stored, rounded = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if not name.endswith(_QUANTISED) or name.startswith(_IGNORED):
            continue
        scales, wide = _scales(tensor, part)
        scales, wide = scales.to(torch.bfloat16).float(), wide.to(torch.bfloat16).float()
        fp8 = (tensor / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        stored[name], rounded[name] = fp8, fp8.float() * wide
        module = name.removesuffix(".weight")
        stored[f"{module}.{scale_name}"] = scales
        if form in ("tensor", "modelopt"):
            stored[f"{module}.input_scale"] = torch.tensor(0.37)
        if form == "tensor-transformers":
            stored[f"{module}.activation_scale"] = torch.tensor(0.37)
        if form == "modelopt" and module.endswith(("k_proj", "v_proj")):
            stored[f"{module}.{module[-6]}_scale"] = torch.tensor(0.21)
    save_file(rounded, path, {"format": "pt"})
    fp8_folder = Path(saved.fp8)
    fp8_folder.mkdir()
    save_file(stored, fp8_folder / "model.safetensors", {"format": "pt"})
    made = json.loads((Path(saved.reference) / "config.json").read_text())
    if form == "modelopt":
        content = {"producer": {"name": "modelopt"}, "quantization": settings}
        (fp8_folder / "hf_quant_config.json").write_text(json.dumps(content))
    else:
        made["quantization_config"] = settings
    (fp8_folder / "config.json").write_text(json.dumps(made))
    return saved


def _scales(weight: Tensor, part: str) -> tuple[Tensor, Tensor]:
    """Return the scales as a checkpoint stores them, and one scale for each weight."""
    if part == "tensor":
        scale = weight.abs().amax() / 448
        return scale, scale.expand(weight.shape)
    if part == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        return scale, scale.expand(weight.shape)
    wide = torch.empty_like(weight)
    grid = torch.empty(-(-weight.shape[0] // 128), -(-weight.shape[1] // 128))
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            block = (slice(i * 128, i * 128 + 128), slice(j * 128, j * 128 + 128))
            grid[i, j] = weight[block].abs().amax() / 448
            wide[block] = grid[i, j]
    return grid, wide
