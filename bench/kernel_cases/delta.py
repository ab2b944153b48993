"""Gated delta nets with the widths of two published models: decode steps, and one long prompt."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minisgl.benchmark.models import SHAPES
from minisgl.distributed.comm import ONE_RANK
from minisgl.kernel import gated_delta
from minisgl.kernel.delta import TAPS, DeltaMemory, DeltaWeights, GatedNorm
from minisgl.kernel.states import StateStep
from minisgl.layers.delta import DeltaSpec
from minisgl.layers.mixer import StateBuild

Make = Callable[[], Callable[[], object]]

_PAGE, _PROMPT = 16, 8192
_DEVICE = torch.device("cuda")


def delta_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. Requests of decode steps stand everywhere in a page."""
    for model in ("qwen3.6-27b", "qwen3.6-35b-a3b"):
        spec = DeltaSpec(16, SHAPES[model]["linear_num_value_heads"], 128, 128, layer=0)
        width = spec.channels(ONE_RANK)
        for rows in (1, 64, 256):
            start = 4096 + torch.arange(rows) % _PAGE
            moved = rows * (spec.step_bytes(_PAGE) + 2 * (width + 2 * 128 * spec.value_heads))
            yield f"delta {model} {rows} rows", moved, _maker(spec, start, torch.ones(rows))
        # Each token has its inputs, its gate and its output; the state is read and written once.
        moved = 2 * _PROMPT * (width + 2 * 128 * spec.value_heads)
        prompt = torch.zeros(1), torch.tensor([_PROMPT])
        yield f"delta {model} prompt of {_PROMPT} tokens", moved, _maker(spec, *prompt)


def _maker(spec: DeltaSpec, start: Tensor, lengths: Tensor) -> Make:
    def make() -> Callable[[], object]:
        rows, tokens = len(start), int(lengths.sum())
        build = StateBuild(rows, _PAGE, False, ONE_RANK, torch.bfloat16, _DEVICE)
        kept = [
            torch.randn(rows, *p.shape, device=_DEVICE, dtype=p.dtype) for p in spec.kept(build)
        ]
        memory: DeltaMemory = spec.memory(kept, build)
        for ring in (memory.keys, memory.deltas, memory.inputs):
            ring.normal_()
        memory.decays.fill_(-0.1)
        heads, width = spec.value_heads, spec.channels(build.tp)
        mixed, (a, b) = _normal(tokens, width), (_normal(tokens, heads) for _ in range(2))
        weights = DeltaWeights(_normal(width, TAPS), *torch.zeros(2, heads, device=_DEVICE))
        page, last = start // _PAGE * _PAGE, (start + lengths - 1) // _PAGE * _PAGE
        entered = (start % _PAGE == 0) & (start > 0)
        first = lengths.cumsum(0) - lengths
        columns = (torch.arange(rows), start, lengths, first, page - _PAGE * entered, last)
        on_device = torch.stack([column.int() for column in columns]).to(_DEVICE)
        step = StateStep.of(on_device, chunks=int(lengths.max() > 1))
        norm = GatedNorm(_normal(128), _normal(tokens, heads * 128), 1e-6)
        return lambda: gated_delta(mixed, a, b, weights, memory, step, norm)

    return make


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)
