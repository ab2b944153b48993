"""Piecewise graphs of steps with drafts, on a CPU: a graph there runs its functions again.

The results of attention for the padding of a graph hold NaN, like uninitialised memory on a GPU.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.attention.torch import TorchAttention, _DecodeStep
from minisgl.engine.engine import Engine
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.piecewise_graph import PieceForward, PieceGraphs, _Piece
from minisgl.models.decoder import Attended
from tests.parity import test_scheduler_parity as parity
from tests.parity.models import build_model
from tests.parity.test_draft_parity import GREEDY, PLAIN
from tests.unit.scheduler.drafts import ChangingDrafts


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_model("qwen3", tmp_path_factory.mktemp("model"))


def largest_first(sizes: Sequence[int], title: str) -> Sequence[int]:
    return sizes[::-1]


class CutError(Exception):
    """Ends a forward at the attention of a layer."""


class Rerun:
    """Takes the place of the graph before the attention of one layer: runs the layers up to it.

    The layers before read the results of their attention from the pieces before.
    """

    def __init__(self, runner: ModelRunner, tokens: Tensor, pieces: list[_Piece]) -> None:
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


def emulated(self: PieceGraphs, runner: ModelRunner, size: int, memory: object) -> PieceForward:
    """Takes the place of PieceGraphs._capture."""
    tokens = torch.as_strided(self._tokens, (len(runner.padding), size), (size, 1))
    config, pieces = runner.model.config, list[_Piece]()
    attended = runner.model.model.empty_attended(size)
    for layer in range(config.num_layers):
        shape = size, config.q_heads, config.head_dim
        last = layer == config.num_layers - 1
        graph = (LastRerun if last else Rerun)(runner, tokens, pieces)
        out = attended.heads.view(shape) if last else attended.heads.new_empty(shape)
        if isinstance(graph, LastRerun):
            graph.residual = attended.residual
        pieces.append(_Piece(graph, layer, attended.heads.new_empty(shape), out, None))  # type: ignore[arg-type]
    return PieceForward(size, tokens, pieces, attended)


@pytest.fixture
def picked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, PieceForward | None]]:
    """Let engines run steps by pieces. Returns the tokens and the forward of each step."""
    found: list[tuple[int, PieceForward | None]] = []
    pick, assemble = PieceGraphs.pick, Engine._assemble
    prepare = TorchAttention._prepare_decode

    def of_the_request(self: TorchAttention, step: AttentionStep, longest: int) -> _DecodeStep:
        """The GPU's kernel reads no key after a context. Read the request's first key instead."""
        prepared = prepare(self, step, longest)
        assert isinstance(prepared, _DecodeStep)
        slots, within = prepared.slots, prepared.mask.any(1)
        return prepared._replace(slots=torch.where(within, slots, slots[:, :1]))

    def record(self: PieceGraphs, num_tokens: int) -> PieceForward | None:
        found.append((num_tokens, pick(self, num_tokens)))
        return found[-1][1]

    @torch.inference_mode()
    def with_pieces(self: Engine, counts: list[int]) -> object:
        launcher = assemble(self, counts)
        launcher.pieces = PieceGraphs(launcher.runner, [16, 32, 64], 1, None, largest_first)
        return launcher

    monkeypatch.setattr(TorchAttention, "_prepare_decode", of_the_request)
    monkeypatch.setattr(PieceGraphs, "_capture", emulated)
    monkeypatch.setattr(PieceGraphs, "pick", record)
    monkeypatch.setattr(Engine, "_assemble", with_pieces)
    monkeypatch.setattr(Engine, "_clear_dummy", torch.inference_mode()(Engine._clear_dummy))
    return found


@pytest.mark.parametrize("index", [2, 3])
@pytest.mark.parametrize("drafting", [False, True])
def test_padding_of_pieces_reaches_no_request(
    drafting: bool, index: int, path: str, picked: list[tuple[int, PieceForward | None]]
) -> None:
    """A draft without a page is stored in the dummy page, as the padding is."""
    expected, _, _ = parity.run(path, PLAIN, [GREEDY])
    picked.clear()
    drafts = ChangingDrafts(7) if drafting else None
    outputs, _, recorder = parity.run(path, parity.CASES[index], [GREEDY], drafts)
    assert outputs == expected
    assert any(piece is not None and tokens < piece.size for tokens, piece in picked)
    mixed = [batch for batch in recorder.batches if 0 < batch.num_decode < batch.num_reqs]
    assert any((batch.lengths[: batch.num_decode] < batch.width).any() for batch in mixed) == (
        drafting
    )
