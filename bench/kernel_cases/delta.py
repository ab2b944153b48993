"""Gated delta nets with the widths of two published models: decode steps, and two long prompts."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bench.kernel_cases.delta_peers import rule_cases
from bench.kernel_cases.states import PAGE, filled_memory, normal, step_of
from minisgl.benchmark.models import SHAPES
from minisgl.distributed.comm import ONE_RANK
from minisgl.kernel.delta import TAPS, DeltaWeights, GatedNorm
from minisgl.kernel.dispatch import gated_delta
from minisgl.layers.delta import DeltaSpec

Make = Callable[[], Callable[[], object]]

_PROMPTS = (2048, 8192)  # tokens


def delta_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. Requests of decode steps stand everywhere in a page."""
    for model in ("qwen3.6-27b", "qwen3.6-35b-a3b"):
        spec = DeltaSpec(16, SHAPES[model]["linear_num_value_heads"], 128, 128, layer=0)
        width = spec.channels(ONE_RANK)
        for rows in (1, 64, 256):
            start = 4096 + torch.arange(rows) % PAGE
            moved = rows * (spec.step_bytes(PAGE) + 2 * (width + 2 * 128 * spec.value_heads))
            yield f"delta {model} {rows} rows", moved, _maker(spec, start, torch.ones(rows))
        for tokens in _PROMPTS:
            # Each token has its inputs, gate and output; the state is read and written once.
            moved = 2 * tokens * (width + 2 * 128 * spec.value_heads)
            prompt = torch.zeros(1), torch.tensor([tokens])
            yield f"delta {model} prompt of {tokens} tokens", moved, _maker(spec, *prompt)
        yield from rule_cases(model, spec, _PROMPTS)


def _maker(spec: DeltaSpec, start: Tensor, lengths: Tensor) -> Make:
    def make() -> Callable[[], object]:
        tokens, heads, width = int(lengths.sum()), spec.value_heads, spec.channels(ONE_RANK)
        memory, step = filled_memory(spec, len(start)), step_of(start, lengths)
        mixed, (a, b) = normal(tokens, width), (normal(tokens, heads) for _ in range(2))
        weights = DeltaWeights(normal(width, TAPS), *torch.zeros(2, heads, device=mixed.device))
        norm = GatedNorm(normal(128), normal(tokens, heads * 128), 1e-6)
        return lambda: gated_delta(mixed, a, b, weights, memory, step, norm)

    return make
