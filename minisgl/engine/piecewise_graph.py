"""CUDA graphs for steps with prompt tokens: one graph for the work between two attentions.

Attention is launched according to the lengths of the requests, which no graph can fix, so it runs
eagerly. The rest depends only on the number of tokens. It is captured for some numbers of tokens,
and steps are padded to them. Without graphs, launching the kernels of such a step takes the host
0.3 ms a layer, which is longer than a small step takes the GPU. After the last attention follows
DecodeGraph.finish, or eager work.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.attention.base import StepAttention
from minisgl.core import step_sizes
from minisgl.engine.model_runner import ModelRunner
from minisgl.kernel import StepViews
from minisgl.models.decoder import Attended


def piece_sizes(largest: int) -> list[int]:
    """Return the numbers of tokens to capture, to which steps with prompts are padded."""
    return step_sizes(min(largest, 4096))


class _Piece(NamedTuple):
    """A graph, and layer, q and out, [size, Hq, D], of the attention that follows it."""

    graph: torch.cuda.CUDAGraph
    layer: int
    q: Tensor
    out: Tensor


class _Cutter:
    """Takes the place of attention during a capture: ends one graph and begins the next."""

    def __init__(self, memory: Any, layers: int) -> None:
        self._memory, self._layers = memory, layers
        self.pieces: list[_Piece] = []
        self.begin()

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        self.graph.capture_end()
        self.pieces.append(_Piece(self.graph, layer, _alias(q), _alias(out)))
        if len(self.pieces) < self._layers:
            self.begin()


class _NoAttention:
    """Takes the place of attention in the run before a capture."""

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        out.zero_()


class _Forward(NamedTuple):
    """The graphs of one size. tokens: int32 [3, size], their input; attended: their result."""

    size: int
    tokens: Tensor
    pieces: list[_Piece]
    attended: Attended


class PieceGraphs:
    """Forwards of several sizes, which run one after the other on the engine's stream.

    I1  The graphs share their memory, and views of it outlive the captured tensors. The result of a
        step is read in the order of the stream, before the next graph runs.
    """

    def __init__(
        self, runner: ModelRunner, sizes: Sequence[int], memory: Any, show_progress: bool
    ) -> None:
        """Capture graphs of these sizes; memory: the pool of the decode graphs. Blocks the host."""
        self._runner = runner
        pool, largest = runner.pool, max(sizes, default=0)
        self._tokens = torch.zeros((3, largest), dtype=torch.int32, device=runner.device)
        padding = [0, 0, pool.dummy_page * pool.page_size]  # id, position, slot
        self._padding = torch.tensor(padding, dtype=torch.int32, device=runner.device)[:, None]
        bar = tqdm(
            sorted(sizes, reverse=True),
            desc="capturing pieces",
            disable=None if show_progress else True,
        )
        self._forwards = [self._capture(size, memory) for size in bar][::-1]

    def forward(
        self,
        views: StepViews[Tensor],
        num_decode_tokens: int,
        num_tokens: int,
        attention: StepAttention,
    ) -> Attended | None:
        """Run the forward like ModelRunner.forward, with padding tokens behind the T tokens.

        Returns None if no size is large enough. The next graph that runs overwrites the result. The
        result keeps its padding: with tensor parallelism the number of rows decides which rows of a
        sum this rank holds, so the next sum must have as many rows, or Attended.take_rows gathers
        them.
        """
        index = bisect_left(self._forwards, num_tokens, key=lambda forward: forward.size)
        if index == len(self._forwards):
            return None
        picked = self._forwards[index]
        tokens = picked.tokens[:, :num_tokens]
        if num_tokens < picked.size:
            picked.tokens[:, num_tokens:] = self._padding
        self._runner.stage(views, num_decode_tokens, tokens)
        for piece in picked.pieces:
            piece.graph.replay()
            attention.forward(piece.layer, piece.q[:num_tokens], piece.out[:num_tokens])
        return picked.attended

    def _capture(self, size: int, memory: Any) -> _Forward:
        runner = self._runner
        tokens = torch.as_strided(self._tokens, (3, size), (size, 1))
        tokens[:] = self._padding
        runner.run(tokens, _NoAttention())  # compiles kernels; libraries choose their algorithms
        torch.cuda.current_stream().synchronize()
        cutter = _Cutter(memory, runner.model.config.num_layers)
        attended = runner.run(tokens, cutter)
        return _Forward(size, tokens, cutter.pieces, Attended(*map(_alias, attended)))


class _Memory:
    """Device memory in the form that torch.as_tensor takes, without a reference to its owner."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """Return a tensor over the same memory that does not keep it allocated.

    Graphs that are captured later can then reuse the memory.
    """
    assert tensor.is_contiguous(), "kernels write whole tensors: this is a bug"
    flat = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
