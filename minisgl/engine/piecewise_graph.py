"""CUDA graphs for steps with prompt tokens: one for all that lies between two attentions.

How attention is launched depends on lengths that no graph can fix, so it runs eagerly; the rest
depends on the number of tokens alone and is captured for some numbers, to which steps are padded.
Launched one by one, the kernels of such a step take the host 0.3 ms a layer: longer than a small
step takes the GPU. What follows on the last attention is DecodeGraph.finish, or eager.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.attention import StepAttention
from minisgl.core import step_sizes
from minisgl.engine.model_runner import DeviceState
from minisgl.kernel import StepViews
from minisgl.models import Attended


def piece_sizes(largest: int) -> list[int]:
    """Numbers of tokens to capture: steps with prompts are padded to them."""
    return step_sizes(min(largest, 4096))


class _Piece(NamedTuple):
    """A graph, and the layer, q and out [size, Hq, D] of the attention that follows it."""

    graph: torch.cuda.CUDAGraph
    layer: int
    q: Tensor
    out: Tensor


class _Cutter:
    """Stands for attention during a capture: ends one graph there and begins the next, if any."""

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
    """For the run before a capture."""

    def forward(self, layer: int, q: Tensor, out: Tensor) -> None:
        out.zero_()


class _Forward(NamedTuple):
    """The graphs of one size. tokens: int32 [3, size]; attended: written last, of `size` tokens."""

    size: int
    tokens: Tensor
    pieces: list[_Piece]
    attended: Attended


class PieceGraphs:
    """Forwards of several sizes, which run one after the other on the engine's stream.

    I1  Graphs share their memory, and views of it outlive the tensors that were captured: what a
        step leaves there is read in the order of the stream, before the next graph runs.
    """

    def __init__(
        self, state: DeviceState, sizes: Sequence[int], memory: Any, show_progress: bool
    ) -> None:
        """memory: the pool of the decode graphs, which may share it. Blocks the host."""
        self._state = state
        pool, largest = state.pool, max(sizes, default=0)
        self._tokens = torch.zeros((3, largest), dtype=torch.int32, device=state.device)
        padding = [0, 0, pool.dummy_page * pool.page_size]  # id, position, slot
        self._padding = torch.tensor(padding, dtype=torch.int32, device=state.device)[:, None]
        bar = tqdm(
            sorted(sizes, reverse=True),
            desc="capturing pieces",
            disable=None if show_progress else True,
        )
        self._forwards = [self._capture(size, memory) for size in bar][::-1]

    def forward(
        self, views: StepViews, num_decode: int, num_tokens: int, attention: StepAttention
    ) -> Attended | None:
        """As DeviceState.forward, with padded tokens behind the T; None where no size is large
        enough. The result is overwritten by the next graph that runs.

        Nothing is cut off here: which rows of a sum a rank has follows from their number, so that
        the next sum takes as many, or Attended.take_rows completes them.
        """
        index = bisect_left(self._forwards, num_tokens, key=lambda forward: forward.size)
        if index == len(self._forwards):
            return None
        chosen = self._forwards[index]
        tokens = chosen.tokens[:, :num_tokens]
        if num_tokens < chosen.size:
            chosen.tokens[:, num_tokens:] = self._padding
        self._state.stage(views, num_decode, tokens)
        for piece in chosen.pieces:
            piece.graph.replay()
            attention.forward(piece.layer, piece.q[:num_tokens], piece.out[:num_tokens])
        return chosen.attended

    def _capture(self, size: int, memory: Any) -> _Forward:
        state = self._state
        tokens = torch.as_strided(self._tokens, (3, size), (size, 1))
        tokens[:] = self._padding
        state.run(tokens, _NoAttention())  # compiles, and lets libraries choose
        torch.cuda.current_stream().synchronize()
        cutter = _Cutter(memory, state.model.config.num_layers)
        attended = state.run(tokens, cutter)
        return _Forward(size, tokens, cutter.pieces, Attended(*map(_alias, attended)))


class _Memory:
    """Device memory as torch.as_tensor takes it, without owning it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def _alias(tensor: Tensor) -> Tensor:
    """The same contiguous memory; `tensor` can be freed, and graphs captured later reuse it."""
    assert tensor.is_contiguous(), "kernels write whole tensors: this is a bug"
    flat = torch.as_tensor(_Memory(tensor), device=tensor.device)
    return flat.view(tensor.dtype).view(tensor.shape)
