"""CUDA graphs for steps with prompt tokens: one graph for the work between two attention calls.

The launch of attention depends on the lengths of the requests. The lengths differ in each step, so
a graph cannot contain this launch, and attention runs eagerly. The other work depends only on the
number of tokens. It is captured for some numbers of tokens, and steps are padded to the next such
number. Without graphs, the host takes 0.3 ms for each layer to launch the kernels. In a small step
the GPU runs these kernels in less time. The work after the last attention runs as
DecodeGraph.finish, or eagerly.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minisgl.attention.base import StepAttention
from minisgl.engine.cuda_graph import LargestFirst
from minisgl.engine.model_runner import ModelRunner
from minisgl.models.decoder import Attended


class _Piece(NamedTuple):
    """A graph, and the arguments of the attention call that follows it. q, out: [size, Hq, D]."""

    graph: torch.cuda.CUDAGraph
    layer: int
    q: Tensor
    out: Tensor
    sinks: Tensor | None


class _Cutter:
    """Takes the place of attention during a capture: ends one graph and begins the next."""

    def __init__(self, memory: Any, layers: int) -> None:
        self._memory, self._layers = memory, layers
        self._aliases: dict[object, Tensor] = {}  # most layers use the same memory
        self.pieces: list[_Piece] = []
        self.begin()

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.graph.capture_end()
        self.pieces.append(_Piece(self.graph, layer, self._alias(q), self._alias(out), sinks))
        if len(self.pieces) < self._layers:
            self.begin()

    def _alias(self, tensor: Tensor) -> Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._aliases:
            self._aliases[key] = _alias(tensor)
        return self._aliases[key]


class _NoAttention:
    """Takes the place of attention in the run before a capture."""

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        out.zero_()


class PieceForward(NamedTuple):
    """The graphs of one size.

    tokens: int32 [2 + pools, size], their input. attended: their result.
    """

    size: int
    tokens: Tensor
    pieces: list[_Piece]
    attended: Attended

    def run(self, tokens: Tensor, attention: StepAttention, clear_padding: bool) -> Attended:
        """Run the forward like ModelRunner.run, over `tokens` and the padding after them.

        tokens: int32 [2 + pools, T], the first T columns of self.tokens, which ModelRunner.stage
        has filled. The result has `size` rows, since it includes the padding. The next graph that
        runs overwrites it.

        clear_padding: set the attention output of the padding to zeros. Otherwise this output is
        uninitialised memory. If it holds NaN, the layers after it store NaN in the dummy page, as
        keys and values of the padding. A request with drafts reads the dummy page if it forwards
        more tokens than it has pages for (scheduler.page_table). The weight of these keys is zero,
        but zero times NaN is NaN. No other request reads the dummy page.

        With tensor parallelism, a rank may hold the residual of only some rows (two shots in
        minisgl.kernel.triton.reduce). The number of rows of the sum decides which rows these are.
        The next sum must therefore have the same number of rows, or Attended.take_rows must first
        gather the rows from all ranks.
        """
        num_tokens = tokens.shape[1]
        for piece in self.pieces:
            piece.graph.replay()
            if clear_padding:
                piece.out[num_tokens:] = 0
            q, out = piece.q[:num_tokens], piece.out[:num_tokens]
            attention.forward(piece.layer, q, out, piece.sinks)
        return self.attended


class PieceGraphs:
    """Forwards of several sizes. They run one after the other on the engine's stream.

    I1  The graphs share their memory, and views of this memory outlive the captured tensors. A
        graph therefore overwrites earlier results. Work that reads a result must be queued on the
        same stream before the next graph.
    """

    def __init__(
        self,
        runner: ModelRunner,
        sizes: Sequence[int],
        rehearsed: int,
        memory: Any,
        largest_first: LargestFirst,
    ) -> None:
        """Capture graphs of these sizes. Blocks the host.

        rehearsed, memory: of the decode graphs.
        """
        rows, largest = len(runner.padding), max(sizes, default=0)
        self._tokens = torch.zeros((rows, largest), dtype=torch.int32, device=runner.device)
        column = [[value] for value in runner.padding]
        self._padding = torch.tensor(column, dtype=torch.int32, device=runner.device)
        self._rehearsed = rehearsed
        self._forwards: list[PieceForward] = []
        for size in largest_first(sizes, "capturing piecewise graphs"):
            self._forwards.insert(0, self._capture(runner, size, memory))

    def pick(self, num_tokens: int) -> PieceForward | None:
        """Return the smallest forward for num_tokens tokens; None if no size is large enough.

        Its tokens after the first num_tokens are set to padding.
        """
        picked = next((one for one in self._forwards if one.size >= num_tokens), None)
        if picked is not None and num_tokens < picked.size:
            picked.tokens[:, num_tokens:] = self._padding
        return picked

    def _capture(self, runner: ModelRunner, size: int, memory: Any) -> PieceForward:
        tokens = torch.as_strided(self._tokens, (len(runner.padding), size), (size, 1))
        tokens[:] = self._padding
        # This run compiles and loads the kernels. In it, libraries choose their algorithms.
        runner.run(tokens, _NoAttention(), self._rehearsed)
        torch.cuda.current_stream().synchronize()
        cutter = _Cutter(memory, runner.model.config.num_layers)
        attended = runner.run(tokens, cutter)
        return PieceForward(size, tokens, cutter.pieces, Attended(*map(_alias, attended)))


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
    assert tensor.is_contiguous(), "the tensors of a graph must be contiguous; this is a bug"
    flat = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
