"""Decode graphs of steps with drafts change no token, on a CPU (emulated_graphs.py)."""

from pathlib import Path

import pytest

from minisgl.core import SamplingParams
from minisgl.distributed.comm import SingleCommunicator
from minisgl.engine.graphs import DecodeShape, graph_shapes
from minisgl.engine.step import GraphStep, StepLauncher
from tests.parity import test_scheduler_parity as parity
from tests.parity.drafter import drafts_of
from tests.parity.models import build_model
from tests.parity.test_draft_parity import MIXED, PLAIN
from tests.process.tiny_model import build_tiny_model
from tests.unit.engine.emulated_graphs import Picked, emulate_decode_graphs
from tests.unit.scheduler.drafts import ChangingDrafts
from tests.unit.structured.grammars import Run, prompt_of, random_tasks, run_tasks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Picked:
    return emulate_decode_graphs(monkeypatch)


def shapes_of(picked: Picked) -> set[DecodeShape]:
    steps = (step for _, step in picked if isinstance(step, GraphStep))
    return {DecodeShape(step.layout.reqs, step.columns.width) for step in steps}


def test_graphs_cover_drafts_up_to_the_limit_of_tokens() -> None:
    assert graph_shapes(4, drafting=False) == [(1, 1), (2, 1), (4, 1)]
    shapes = graph_shapes(256, drafting=True)
    assert DecodeShape(256, 1) == shapes[-1], "the largest graph without drafts is captured first"
    for width, largest in ((1, 256), (2, 128), (4, 64), (8, 32)):
        assert max(shape.reqs for shape in shapes if shape.width == width) == largest


@pytest.mark.parametrize(("index", "family"), [(2, "qwen3"), (5, "gemma2")])
def test_graphs_with_drafts_change_no_token(
    index: int, family: str, graphs: Picked, tmp_path: Path
) -> None:
    path = build_model(family, tmp_path)
    expected, _, _ = parity.run(path, PLAIN, MIXED)
    assert graphs
    graphs.clear()
    outputs, _, _ = parity.run(path, parity.CASES[index], MIXED, ChangingDrafts(7))
    assert outputs == expected * parity.CASES[index].waves
    assert {width for _, width in shapes_of(graphs)} == {1, 2, 4, 8}
    by_graph = [isinstance(step, GraphStep) for _, step in graphs]
    assert not all(by_graph), "some steps have prompts"
    padded = [len(batch.rows) for (batch, _), graph in zip(graphs, by_graph, strict=True) if graph]
    assert {3, 5} & {*padded}, "some graphs have padding"


def test_graphs_with_drafts_change_no_constrained_answer(graphs: Picked, tmp_path: Path) -> None:
    """The masks need the drafts before the graph runs, which finds them too."""
    arguments = SingleCommunicator(), str(tmp_path), str(build_tiny_model(tmp_path / "tiny"))
    tasks = random_tasks(30, seed=1)
    expected = run_tasks(*arguments, Run(), tasks)
    graphs.clear()
    sequences = [prompt_of(uid) + tokens for uid, tokens in enumerate(expected.tokens)]
    half_right = drafts_of(sequences, "half right")
    found = run_tasks(*arguments, Run(drafts=True), tasks, half_right)
    assert found.tokens == expected.tokens
    assert {width for _, width in shapes_of(graphs)} == {1, 2, 4, 8}
    assert sum(found.totals.drafts.accepted) > 0


def test_graphs_without_drafts_change_no_token(
    path: str, graphs: Picked, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = [SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True)]
    by_graph, _, _ = parity.run(path, PLAIN, sampling)
    assert shapes_of(graphs)
    graphs.clear()
    monkeypatch.setattr(StepLauncher, "pick", lambda self, batch: self._eager)
    assert parity.run(path, PLAIN, sampling)[0] == by_graph
    assert not graphs
