"""Decode graphs of steps with drafts, on a CPU: a graph there runs its functions again.

Attention with fixed tensors takes the place of the GPU's. Streams and capture run on a GPU only
(tests/gpu/test_draft_engine.py).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from minisgl.attention.base import AttentionStep, DecodeGraphAttention
from minisgl.attention.torch import TorchAttention
from minisgl.core import Batch, SamplingParams
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine.cuda_graph import DecodeGraph, DecodeGraphs, DecodeShape, graph_shapes
from minisgl.engine.engine import Engine
from tests.parity import test_scheduler_parity as parity
from tests.parity.drafter import drafts_of
from tests.parity.models import build_model
from tests.parity.test_draft_parity import MIXED, PLAIN
from tests.process.tiny_model import build_tiny_model
from tests.unit.scheduler.drafts import ChangingDrafts
from tests.unit.structured.grammars import Run, prompt_of, random_tasks, run_tasks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", tmp_path_factory.mktemp("model"))


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
    """Takes the place of a captured graph."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.replay = run


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Batch, object]]:
    """Let engines run decode steps by graphs. Returns the batches, each with its graph or None."""
    picked: list[tuple[Batch, object]] = []
    pick, sample, assemble = DecodeGraphs.pick, DecodeGraph.sample, Engine._assemble

    def decode_graph(self: TorchAttention, size: int, step: AttentionStep) -> DecodeGraphAttention:
        return FixedAttention(self, step)

    def capture(
        self: DecodeGraphs,
        run: Callable[[], object],
        rehearsal: Callable[[], object] | None = None,
    ) -> Rerun:
        (rehearsal or run)()
        return Rerun(run)

    def record(self: DecodeGraphs, batch: Batch) -> object:
        picked.append((batch, pick(self, batch)))
        return picked[-1][1]

    def copied(self: DecodeGraph, filters: bool) -> torch.Tensor:
        # On a GPU the copy to the host comes before the next graph. On a CPU there is no copy.
        return sample(self, filters).clone()

    @torch.inference_mode()
    def with_graphs(self: Engine, counts: list[int]) -> object:
        launcher = assemble(self, counts)
        shapes, _ = self._graph_sizes()
        launcher.graphs = DecodeGraphs(launcher.runner, shapes, lambda sizes, title: sizes[::-1])
        return launcher

    monkeypatch.setattr(TorchAttention, "decode_graph", decode_graph)
    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    monkeypatch.setattr(DecodeGraphs, "pick", record)
    monkeypatch.setattr(DecodeGraph, "sample", copied)
    monkeypatch.setattr(Engine, "_assemble", with_graphs)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    # The graphs are built in inference mode, so the warm-up must end in it.
    monkeypatch.setattr(Engine, "_clear_dummy", torch.inference_mode()(Engine._clear_dummy))
    return picked


def test_graphs_cover_drafts_up_to_the_limit_of_tokens() -> None:
    assert graph_shapes(4, drafting=False) == [(1, 1), (2, 1), (4, 1)]
    shapes = graph_shapes(256, drafting=True)
    assert DecodeShape(256, 1) == shapes[-1], "the largest graph without drafts is captured first"
    for width, largest in ((1, 256), (2, 128), (4, 64), (8, 32)):
        assert max(shape.reqs for shape in shapes if shape.width == width) == largest


@pytest.mark.parametrize("index", [2, 5])
def test_graphs_with_drafts_change_no_token(
    index: int, path: str, graphs: list[tuple[Batch, object]]
) -> None:
    expected, _, _ = parity.run(path, PLAIN, MIXED)
    assert graphs
    graphs.clear()
    outputs, _, _ = parity.run(path, parity.CASES[index], MIXED, ChangingDrafts(7))
    assert outputs == expected
    widths = {batch.width for batch, graph in graphs if graph is not None}
    assert widths == {1, 2, 4, 8}
    assert any(graph is None for _, graph in graphs), "some steps have prompts"
    reqs = {batch.num_reqs for batch, graph in graphs if graph is not None}
    assert 3 in reqs, "some graphs have padding"


def test_graphs_with_drafts_change_no_constrained_answer(
    graphs: list[tuple[Batch, object]], tmp_path: Path
) -> None:
    """The masks need the drafts before the graph runs, which finds them too."""
    arguments = SingleCommunicator(), str(tmp_path), str(build_tiny_model(tmp_path / "tiny"))
    tasks = random_tasks(30, seed=1)
    expected = run_tasks(*arguments, Run(), tasks)
    graphs.clear()
    sequences = [prompt_of(uid) + tokens for uid, tokens in enumerate(expected.tokens)]
    half_right = drafts_of(sequences, "half right")
    found = run_tasks(*arguments, Run(drafts=True), tasks, half_right)
    assert found.tokens == expected.tokens
    assert {batch.width for batch, graph in graphs if graph is not None} == {1, 2, 4, 8}
    assert sum(found.totals.drafts.accepted) > 0


def test_graphs_without_drafts_change_no_token(
    path: str, graphs: list[tuple[Batch, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = [SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)]
    by_graph, _, _ = parity.run(path, PLAIN, sampling)
    monkeypatch.setattr(DecodeGraphs, "pick", lambda self, batch: None)
    assert parity.run(path, PLAIN, sampling)[0] == by_graph
    assert any(graph is not None for _, graph in graphs)
