"""Piecewise graphs of steps with drafts, on a CPU: a graph there runs its functions again.

The results of attention for the padding of a graph hold NaN, like uninitialised memory on a GPU.
"""

import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.attention.torch import TorchAttention, _DecodeStep
from minisgl.core.batch import Batch
from minisgl.engine import ModelRunner
from minisgl.engine.start import Start
from minisgl.engine.step import (
    PieceForward,
    PieceGraph,
    PiecewiseStep,
    Step,
    StepGraphs,
    StepLauncher,
    StepParts,
)
from minisgl.models.decoder import CausalLM
from minisgl.models.layer import Attended
from tests.parity import test_scheduler_parity as parity
from tests.parity.models import build_model
from tests.parity.test_draft_parity import GREEDY, PLAIN
from tests.unit.scheduler.drafts import ChangingDrafts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", tmp_path_factory.mktemp("model"))


class CutError(Exception):
    """Ends a forward at the attention of a layer."""


class Rerun:
    """Takes the place of the graph before the attention of one layer: runs the layers up to it.

    The layers before read the results of their attention from the pieces before.
    """

    def __init__(self, runner: ModelRunner, tokens: Tensor, pieces: list[PieceGraph]) -> None:
        self._runner, self._tokens, self._pieces = runner, tokens, pieces
        self._nth = len(pieces)

    def replay(self) -> Attended | None:
        """Return the result of the forward if this is its last graph."""
        last = self._nth == self._runner.model.config.num_layers - 1
        self._ends = not last
        try:
            return self._runner.run(self._tokens, self)
        except CutError:
            return None

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        piece = self._pieces[layer]
        if layer < self._nth:
            out.copy_(piece.out)
            return
        piece.q.copy_(q)
        piece.out.fill_(float("nan"))
        if self._ends:
            raise CutError


class LastRerun(Rerun):
    """As Rerun, for the last layer: also writes the residual stream."""

    residual: Tensor

    def replay(self) -> Attended | None:
        attended = super().replay()
        assert attended is not None
        self.residual.copy_(attended.residual)
        return attended


def emulated(parts: StepParts, size: int) -> PieceForward:
    """Takes the place of graphs.capture_pieces."""
    runner = parts.runner
    tokens = torch.zeros((len(runner.padding), size), dtype=torch.int32)
    config, pieces = runner.model.config, list[PieceGraph]()
    attended = runner.model.model.empty_attended(size)
    for layer in range(config.num_layers):
        shape = size, config.q_heads, config.kv_specs[0].head_dim
        last = layer == config.num_layers - 1
        graph = (LastRerun if last else Rerun)(runner, tokens, pieces)
        out = attended.heads.view(shape) if last else attended.heads.new_empty(shape)
        if isinstance(graph, LastRerun):
            graph.residual = attended.residual
        pieces.append(PieceGraph(graph, layer, attended.heads.new_empty(shape), out, None))  # type: ignore[arg-type]
    return PieceForward(tokens, tuple(pieces), attended)


@pytest.fixture
def picked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Step]]:
    """Let engines run steps by pieces. Returns the tokens of each step, and its way to run."""
    found: list[tuple[int, Step]] = []
    pick, assemble = StepLauncher.pick, Start.assemble
    prepare = TorchAttention._prepare_decode

    def of_the_request(self: TorchAttention, step: AttentionStep, longest: int) -> _DecodeStep:
        """The GPU's kernel reads no key after a context. Read the request's first key instead."""
        prepared = prepare(self, step, longest)
        assert isinstance(prepared, _DecodeStep)
        slots, within = prepared.slots, prepared.mask.any(1)
        return prepared._replace(slots=torch.where(within, slots, slots[:, :1]))

    def record(self: StepLauncher, batch: Batch) -> Step:
        tokens = batch.num_decode * batch.width + len(batch.chunk_ids)
        found.append((tokens, pick(self, batch)))
        return found[-1][1]

    @torch.inference_mode()
    def with_pieces(self: Start, model: CausalLM, counts: list[int]) -> StepLauncher:
        launcher = assemble(self, model, counts)
        pieces = [emulated(launcher.parts, size) for size in (16, 32, 64)]
        graphs = StepGraphs(pieces=tuple(pieces))
        return StepLauncher(launcher.parts, launcher.processors, launcher.on_stream, graphs)

    monkeypatch.setattr(TorchAttention, "_prepare_decode", of_the_request)
    monkeypatch.setattr(StepLauncher, "pick", record)
    monkeypatch.setattr(Start, "assemble", with_pieces)
    clear = torch.inference_mode()(ModelRunner.clear_dummy)
    monkeypatch.setattr(ModelRunner, "clear_dummy", clear)
    return found


@pytest.mark.parametrize("index", [2, 3])
@pytest.mark.parametrize("drafting", [False, True])
def test_padding_of_pieces_reaches_no_request(
    drafting: bool, index: int, path: str, picked: list[tuple[int, Step]]
) -> None:
    """A draft without a page is stored in the dummy page, as the padding is."""
    expected, _, _ = parity.run(path, PLAIN, [GREEDY])
    picked.clear()
    drafts = ChangingDrafts(7) if drafting else None
    outputs, _, recorder = parity.run(path, parity.CASES[index], [GREEDY], drafts)
    assert outputs == expected * parity.CASES[index].waves
    pieces = [(tokens, step) for tokens, step in picked if isinstance(step, PiecewiseStep)]
    assert any(tokens < step.size for tokens, step in pieces)
    mixed = [batch for batch in recorder.batches if 0 < batch.num_decode < len(batch.rows)]
    assert any((batch.lengths[: batch.num_decode] < batch.width).any() for batch in mixed) == (
        drafting
    )
