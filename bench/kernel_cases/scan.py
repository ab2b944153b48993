"""Mamba-2 with the widths of two shapes of Granite 4: decode steps."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from minisgl.benchmark.models import SHAPES
from minisgl.distributed.comm import ONE_RANK
from minisgl.kernel import selective_scan
from minisgl.kernel.delta import TAPS, DeltaMemory
from minisgl.kernel.ssd import SsdWeights
from minisgl.kernel.states import StateStep
from minisgl.layers.mamba import MambaSpec
from minisgl.layers.mixer import StateBuild

Make = Callable[[], Callable[[], object]]

_PAGE = 16
_DEVICE = torch.device("cuda")


def scan_cases() -> Iterator[tuple[str, int, Make]]:
    """Yield the fields of a kernels.Case. The requests stand everywhere in a page."""
    for model in ("granite-4.0-h-micro", "granite-4.0-h-tiny"):
        heads = SHAPES[model]["mamba_n_heads"]
        spec = MambaSpec(1, heads, SHAPES[model]["mamba_d_state"], 64, layer=0)
        for rows in (1, 64, 256):
            moved = rows * (spec.step_bytes(_PAGE) + 2 * (_channels(spec) + spec.inner))
            yield f"scan {model} {rows} rows", moved, _maker(spec, rows)


def _channels(spec: MambaSpec) -> int:
    return 2 * spec.groups * spec.state_dim + spec.inner


def _maker(spec: MambaSpec, rows: int) -> Make:
    def make() -> Callable[[], object]:
        build = StateBuild(rows, _PAGE, False, ONE_RANK, torch.bfloat16, _DEVICE)
        kept = [
            torch.randn(rows, *p.shape, device=_DEVICE, dtype=p.dtype) for p in spec.kept(build)
        ]
        memory: DeltaMemory = spec.memory(kept, build)
        for ring in (memory.keys, memory.deltas, memory.inputs):
            ring.normal_()
        memory.decays.fill_(-0.1)
        width = _channels(spec)
        wide = _normal(rows, width + spec.heads)
        mixed, dt = wide[:, :width], wide[:, width:]
        rates = torch.rand(3, spec.heads, device=_DEVICE)
        weights = SsdWeights(_normal(width, TAPS), _normal(width), *rates)
        number = torch.arange(rows)
        start = 4096 + number % _PAGE
        page, entered = start // _PAGE * _PAGE, start % _PAGE == 0
        columns = (number, start, torch.ones(rows), number, page - _PAGE * entered, page)
        on_device = torch.stack([column.int() for column in columns]).to(_DEVICE)
        step = StateStep.of(on_device, chunks=0)
        return lambda: selective_scan(mixed, dt, weights, memory, step)

    return make


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=_DEVICE, dtype=torch.bfloat16)
