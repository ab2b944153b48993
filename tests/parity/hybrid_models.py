"""Tiny random float32 models with recurrent states."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

BASE: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "eos_token_id": 2,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 40,
}


def dense(**changes: Any) -> Any:
    return transformers.Qwen3_5TextConfig(**BASE | changes)


def _sparse(**changes: Any) -> Any:
    sizes = {name: size for name, size in BASE.items() if name != "intermediate_size"}
    return transformers.Qwen3_5MoeTextConfig(**sizes | EXPERTS | changes)


def _next(**changes: Any) -> Any:
    return transformers.Qwen3NextConfig(**BASE | EXPERTS | changes)


def granite(**changes: Any) -> Any:
    sizes = {key: size for key, size in BASE.items() if not key.startswith(("linear", "head"))}
    own = {
        "mamba_n_heads": 8,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_head": 16,
        "shared_intermediate_size": 80,
        "num_local_experts": 0,
        "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
        "num_hidden_layers": 6,
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.6,
        "logits_scaling": 2.0,
    }
    return transformers.GraniteMoeHybridConfig(**sizes | own | changes)


def nemotron(pattern: str, **changes: Any) -> Any:
    sizes = {key: size for key, size in BASE.items() if not key.startswith(("linear", "num_hidd"))}
    own = {
        "hybrid_override_pattern": pattern,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "moe_shared_expert_intermediate_size": 80,
        "routed_scaling_factor": 2.5,
    }
    return transformers.NemotronHConfig(**sizes | own | changes)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen3_5": dense,
    "qwen3_5-equal-heads": lambda: dense(
        linear_num_key_heads=32, linear_num_value_heads=32, tie_word_embeddings=True
    ),
    "qwen3_5-ends-with-delta": lambda: dense(
        layer_types=["full_attention", "linear_attention"] * 2,
        linear_num_key_heads=1,
        num_attention_heads=8,
        vocab_size=256,
    ),
    "qwen3_5_moe": _sparse,
    "qwen3_next": _next,
    "qwen3_next-dense-layer": lambda: _next(
        mlp_only_layers=[1],
        norm_topk_prob=False,
        shared_expert_intermediate_size=80,
        linear_num_value_heads=32,
    ),
    "granite4": granite,
    "granite4-experts": lambda: granite(
        num_local_experts=6, num_experts_per_tok=2, intermediate_size=40
    ),
    "granite4-groups": lambda: granite(
        mamba_n_groups=2, mamba_d_state=32, tie_word_embeddings=True
    ),
    "granite4-ends-with-mamba": lambda: granite(
        layer_types=["full_attention", "linear_attention"],
        num_hidden_layers=2,
        position_embedding_type="rope",
        mamba_n_groups=4,
    ),
    "nemotron_h": lambda: nemotron("MEM*EME"),
    "nemotron_h-dense": lambda: nemotron("M-M*-M-", ssm_state_size=32, n_groups=8),
    "nemotron_h-ends-with-attention": lambda: nemotron(
        "ME*", n_groups=1, norm_topk_prob=False, moe_shared_expert_intermediate_size=40
    ),
}


def save(name: str, folder: Path) -> tuple[Any, str]:
    """Save a random model whose decays, norms and convolutions have no default values."""
    torch.manual_seed(0)
    config, path = MODELS[name](), str(folder / name)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        own = ("norm.weight", "norm_f.weight", "dt_bias", "A_log", "conv1d.weight", ".D", ".bias")
        for tensor, parameter in itertools.chain(model.named_parameters(), model.named_buffers()):
            if tensor.endswith((*own, "e_score_correction_bias")):
                plain = "linear_attn.norm" in tensor or name.startswith(("granite4", "nemotron"))
                parameter.normal_(1.0 if plain and "norm" in tensor else 0.0, 0.3)
    model.save_pretrained(path)
    return model, path


# The names of a checkpoint for the modules of transformers' MtpLayer.
_HEAD_NAMES = {
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "mtp_block": "layers.0",
    "post_norm": "norm",
}


QUIET = 0.008  # the factor on the output of each block


class Heads:
    """A model and its draft head as transformers computes them.

    path: the checkpoint with both.
    """

    def __init__(self, model: Any, path: str, *, agrees: bool = False) -> None:
        """Add a random head to the checkpoint of `model` in `path`.

        agrees: most drafts are right, since the layers hardly change the embedding.
        """
        from transformers.modeling_layers import MtpModel  # takes 2 s, which ranks do not need

        self.model, self.path, folder = model, path, Path(path)
        self.model.config.num_mtp_layers = 1
        self.model.config.mtp_layer_types = ["full_attention"]
        self.head = MtpModel(self.model, 1).float().eval()
        (layer,) = self.head.layers
        with torch.no_grad():
            for tensor, parameter in layer.named_parameters():
                parameter.normal_(0.0, 0.3 if "norm" in tensor else 0.2)
            if agrees:
                self._quieten(layer)
        tensors = load_file(folder / "model.safetensors")
        if agrees:
            saved = self.model.state_dict()
            tensors |= {key: saved[key] for key in tensors if key in saved}
        for tensor, value in layer.state_dict().items():
            module, _, rest = tensor.partition(".")
            tensors[f"mtp.{_HEAD_NAMES[module]}.{rest}"] = value
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))

    def _quieten(self, layer: Any) -> None:
        for module in (self.model, layer):
            for tensor, parameter in module.named_parameters():
                if tensor.removesuffix(".weight").endswith(("o_proj", "out_proj", "down_proj")):
                    parameter.mul_(QUIET)
        size = self.model.config.hidden_size
        layer.eh_proj.weight.mul_(0.1)
        layer.eh_proj.weight[:, :size] += torch.eye(size)
        layer.enorm.weight.zero_()
        layer.post_norm.weight.copy_(self.model.model.norm.weight)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Return the greedy drafts after `tokens`. The state before the first token is zero."""
        from transformers.cache_utils import MtpCache

        ids, found = list(tokens), list[int]()
        hidden = self.model.model(torch.tensor([tokens])).last_hidden_state
        before = torch.cat((torch.zeros_like(hidden[:, :1]), hidden[:, :-1]), dim=1)
        for _ in range(count):
            places = torch.arange(len(ids)).unsqueeze(0)
            cache = MtpCache(config=self.head.config)
            y = self.head.forward_layer(0, before, places, cache, input_ids=torch.tensor([ids]))
            found.append(int(self.model.lm_head(y[0, -1]).argmax()))
            ids.append(found[-1])
            before = torch.cat((before, y[:, -1:]), dim=1)
        return found
