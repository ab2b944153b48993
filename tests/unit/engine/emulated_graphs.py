"""CUDA graphs of decode steps on a CPU: a graph there runs its functions again.

Attention with fixed tensors takes the place of the GPU's. Streams and capture run on a GPU only
(tests/gpu/test_draft_engine.py).
"""

import sys
from collections.abc import Callable, Sequence

import pytest
import torch

from minisgl.attention.base import AttentionStep, DecodeGraphAttention
from minisgl.attention.torch import TorchAttention
from minisgl.core.batch import Batch
from minisgl.engine import ModelRunner, graphs
from minisgl.engine.logits_processing import Edits
from minisgl.engine.start import Start
from minisgl.engine.step import GraphStep, Step, StepLauncher
from minisgl.engine.step_tensors import Logits, StepTensors
from minisgl.models.decoder import CausalLM

Picked = list[tuple[Batch, Step]]


class FixedAttention:
    """Implements DecodeGraphAttention over all positions that a row of the page table has."""

    def __init__(self, backend: TorchAttention, step: AttentionStep) -> None:
        self._backend, self._step = backend, step

    def compute_metadata(self) -> None:
        pool, step = self._backend._pool, self._step
        longest = step.page_table.shape[1] * pool.page_size
        self._attention = self._backend._prepare_decode(step, longest)

    def forward(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> None:
        self._attention.forward(layer, q, out, sinks)


class Rerun:
    """Takes the place of a captured graph. A profiler of the host does not see its functions."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run = run

    def replay(self) -> None:
        profiler = sys.getprofile()
        sys.setprofile(None)
        self._run()
        sys.setprofile(profiler)


def largest_first(sizes: Sequence[object], title: str) -> Sequence[object]:
    return sizes[::-1]


def emulate_decode_graphs(monkeypatch: pytest.MonkeyPatch) -> Picked:
    """Let engines run decode steps by graphs. Returns the batches, each with its way to run."""
    picked: Picked = []
    pick, run, assemble = StepLauncher.pick, GraphStep.run, Start.assemble

    def decode_graph(self: TorchAttention, size: int, step: AttentionStep) -> DecodeGraphAttention:
        return FixedAttention(self, step)

    def capture(run: Callable[[], object], rehearse: Callable[[], object], memory: object) -> Rerun:
        rehearse()
        return Rerun(run)

    def record(self: StepLauncher, batch: Batch) -> Step:
        picked.append((batch, pick(self, batch)))
        return picked[-1][1]

    def copied(self: GraphStep, x: StepTensors, edits: Edits) -> tuple[Logits, torch.Tensor]:
        # On a GPU the copy to the host comes before the next graph. On a CPU there is no copy.
        out, tokens = run(self, x, edits)
        return out, tokens.clone()

    @torch.inference_mode()
    def with_graphs(self: Start, model: CausalLM, counts: list[int]) -> StepLauncher:
        launcher = assemble(self, model, counts)
        shapes, _ = self.graph_sizes()
        captured = graphs.capture_steps(launcher.parts, shapes, [], largest_first)
        return StepLauncher(launcher.parts, launcher.processors, launcher.on_stream, captured)

    monkeypatch.setattr(TorchAttention, "decode_graph", decode_graph)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(StepLauncher, "pick", record)
    monkeypatch.setattr(GraphStep, "run", copied)
    monkeypatch.setattr(Start, "assemble", with_graphs)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    # The graphs are built in inference mode, so the warm-up must end in it.
    clear = torch.inference_mode()(ModelRunner.clear_dummy)
    monkeypatch.setattr(ModelRunner, "clear_dummy", clear)
    return picked
