"""Mixture-of-experts layers with the widths of Qwen3-30B-A3B and of gpt-oss, from router to sum."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear

from minisgl.kernel.activation import ClampedSwiglu
from minisgl.kernel.dispatch import silu_and_mul
from minisgl.kernel.mxfp4_weights import num_chunks
from minisgl.moe.base import (
    ExpertMatrix,
    ExpertWeights,
    MoeBackend,
    Router,
    route,
)
from minisgl.moe.triton_backend import TritonMoe

_HIDDEN, _INNER, _EXPERTS, _TOP_K = 2048, 768, 128, 8
_GPT_OSS_WIDTH, _GPT_OSS_TOP_K = 2880, 4  # hidden and inner size
_GPT_OSS_EXPERTS = {"20b": 32, "120b": 128}

Make = Callable[[], Callable[[], object]]
Routed = tuple[Router, ExpertWeights]
Layer = Callable[[Tensor, Router, ExpertWeights], Tensor]


def grouped_mm(x: Tensor, router: Router, weights: ExpertWeights) -> Tensor:
    """As MoeBackend.forward for experts like those of Qwen3, by torch's grouped matrix product."""
    top_k = router.top_k
    scales, experts = route(linear(x, router.weight), router)
    sorted_experts, order = experts.flatten().sort(stable=True)
    ids = torch.arange(len(router.weight), device=x.device)
    ends = torch.searchsorted(sorted_experts, ids, right=True).int()
    gate_up, down = (one.values.transpose(1, 2) for one in (weights.gate_up, weights.down))
    both = torch._grouped_mm(x[order // top_k], gate_up, offs=ends)
    parts = torch._grouped_mm(silu_and_mul(both), down, offs=ends)[order.argsort()]
    return torch.einsum("tkh,tk->th", parts.view(len(x), top_k, -1), scales.to(x.dtype))


def layer_cases(tokens: Sequence[int]) -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case, for the engine's layer and for torch's.

    bytes_moved counts the experts to which at least one token is routed.
    """
    ours = TritonMoe(torch.device("cuda")).forward
    layer_of = {"ours": ours, "torch grouped_mm": grouped_mm}
    layers: list[Routed] = []
    for count in tokens:
        used_experts = _EXPERTS * (1 - (1 - _TOP_K / _EXPERTS) ** count)
        moved = int(6 * _HIDDEN * _INNER * used_experts) + 2 * _HIDDEN * (_EXPERTS + 2 * count)
        for name, layer in layer_of.items():
            yield f"experts {count} tokens, {name}", moved, _maker(layer, count, layers)


def gpt_oss_cases(tokens: Sequence[int]) -> Iterator[tuple[str, int, Make]]:
    """As layer_cases, for MXFP4 experts."""
    backend, width = TritonMoe(torch.device("cuda")), _GPT_OSS_WIDTH
    for model, experts in _GPT_OSS_EXPERTS.items():
        layers: list[Routed] = []
        for count in tokens:
            used = experts * (1 - (1 - _GPT_OSS_TOP_K / experts) ** count)
            # 3 matrices with a byte for 2 weights and one for each scale of 32 weights, and biases
            expert_bytes = 3 * width * width * 17 // 32 + 6 * width
            moved = int(used * expert_bytes) + 2 * width * (experts + 2 * count)
            make = _gpt_oss_maker(backend, count, experts, layers)
            yield f"mxfp4 experts of gpt-oss-{model} {count} tokens", moved, make


def _gpt_oss_maker(backend: MoeBackend, tokens: int, experts: int, layers: list[Routed]) -> Make:
    width, rows = _GPT_OSS_WIDTH, 2 * _GPT_OSS_WIDTH
    chunks = num_chunks(width)

    def make() -> Callable[[], object]:
        if not layers:
            bias, swiglu = _normal(experts), ClampedSwiglu(1.702, 7.0)
            router = Router(_normal(experts, width) * width**-0.5, bias, _GPT_OSS_TOP_K, True)
            gate_up, down = (_mxfp4(experts, chunks, height) for height in (rows, width))
            layers.append((router, ExpertWeights(gate_up, down, swiglu)))
        x = _normal(tokens, width)
        return lambda: backend.forward(x, *layers[0])

    return make


def _mxfp4(experts: int, chunks: int, rows: int) -> ExpertMatrix:
    codes = _bytes(0, 256, experts, chunks, rows, 64)
    return ExpertMatrix(codes, _bytes(118, 122, experts, chunks, rows, 4), _normal(experts, rows))


def _bytes(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, device="cuda", dtype=torch.uint8)


def _maker(layer: Layer, tokens: int, layers: list[Routed]) -> Make:
    """Return Case.make. All cases share one set of weights of 1.2 GB, built on first use."""

    def make() -> Callable[[], object]:
        if not layers:
            router = Router(_normal(_EXPERTS, _HIDDEN), None, _TOP_K, True)
            gate_up = ExpertMatrix(_normal(_EXPERTS, 2 * _INNER, _HIDDEN) * 0.02)
            down = ExpertMatrix(_normal(_EXPERTS, _HIDDEN, _INNER) * 0.02)
            layers.append((router, ExpertWeights(gate_up, down)))
        x = _normal(tokens, _HIDDEN)
        return lambda: layer(x, *layers[0])

    return make


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)
