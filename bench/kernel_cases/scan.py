"""Mamba-2 with the widths of two shapes of Granite 4: decode steps."""

from collections.abc import Callable, Iterator

import torch

from bench.kernel_cases.states import PAGE, filled_memory, normal, step_of
from minisgl.benchmark.models import SHAPES
from minisgl.kernel.delta import TAPS
from minisgl.kernel.dispatch import selective_scan
from minisgl.kernel.ssd import SsdWeights
from minisgl.layers.mamba import MambaSpec

Make = Callable[[], Callable[[], object]]


def scan_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. The requests stand everywhere in a page."""
    for model in ("granite-4.0-h-micro", "granite-4.0-h-tiny"):
        heads = SHAPES[model]["mamba_n_heads"]
        spec = MambaSpec(1, heads, SHAPES[model]["mamba_d_state"], 64, layer=0)
        for rows in (1, 64, 256):
            moved = rows * (spec.step_bytes(PAGE) + 2 * (_channels(spec) + spec.inner))
            yield f"scan {model} {rows} rows", moved, _maker(spec, rows)


def _channels(spec: MambaSpec) -> int:
    return 2 * spec.groups * spec.state_dim + spec.inner


def _maker(spec: MambaSpec, rows: int) -> Make:
    def make() -> Callable[[], object]:
        width = _channels(spec)
        memory = filled_memory(spec, rows)
        step = step_of(4096 + torch.arange(rows) % PAGE, torch.ones(rows))
        wide = normal(rows, width + spec.heads)
        mixed, dt = wide[:, :width], wide[:, width:]
        rates = torch.rand(3, spec.heads, device=wide.device)
        weights = SsdWeights(normal(width, TAPS), normal(width), *rates)
        return lambda: selective_scan(mixed, dt, weights, memory, step)

    return make
