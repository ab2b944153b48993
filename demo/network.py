"""The Qwen3 decoder, as small as training needs it.

Parameter names are those of the published Qwen3 checkpoints, so the exported file contains the
state dictionary without renaming. A test compares it with the implementation in transformers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the network; the defaults are those of the shipped model."""

    vocab_size: int = 1280
    hidden_size: int = 256
    intermediate_size: int = 640
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100_000.0

    def config(self, end_ids: list[int], pad_id: int) -> dict[str, object]:
        """Return config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **asdict(self),
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": end_ids[0],
            "pad_token_id": pad_id,
            "torch_dtype": "bfloat16",
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


def rotary_table(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each [length, head_dim], fp32."""
    exponent = torch.arange(0, shape.head_dim, 2, device=device).float() / shape.head_dim
    angle = torch.outer(
        torch.arange(length, device=device).float(), 1.0 / shape.rope_theta**exponent
    )
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.num_attention_heads, shape.num_key_value_heads
        self.head_dim = shape.head_dim
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        """x: [rows, length, hidden]; mask: bool [rows, 1, length, length], None means causal."""
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q = _rotate(q.transpose(1, 2), cos, sin).to(v.dtype)
        k = _rotate(k.transpose(1, 2), cos, sin).to(v.dtype)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return projected


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = MLP(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Network(nn.Module):
    """The whole decoder; output and input embedding are one matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        shrink = 1.0 / math.sqrt(2 * shape.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_output = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 * (shrink if is_output else 1.0))

    def hidden(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the hidden states [rows, length, hidden] after the last norm. ids: [rows,
        length].
        """
        cos, sin = rotary_table(self.shape, ids.shape[1], ids.device)
        x: Tensor = self.model.embed_tokens(ids).float()
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        out: Tensor = self.model.norm(x)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """Return logits for any selection of states [..., hidden]."""
        return F.linear(states, self.model.embed_tokens.weight)
