"""Captures the CUDA graphs of steps. They share one memory and run one after the other.

Decode steps    for each number of requests and each number of tokens of a request, one graph of the
                forward and two of the sampler. A further graph for each number of requests computes
                the logits from the output of the last attention. Steps with prompts use it, because
                cuBLAS takes 0.1 s to load kernels for a number of rows that it sees for the first
                time.
Pieces          for some numbers of tokens, a graph of the work between two attention calls. The
                launch of attention depends on the lengths of the requests, which differ in each
                step, so a graph cannot contain it. Layers with states read the lengths on the
                device, so graphs contain them. Without graphs, the host takes 0.3 ms for each
                layer to launch the kernels; a GPU runs those of a small step in less time.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.core.config import DRAFT_WIDTHS, MAX_DRAFT_TOKENS
from minisgl.engine.last_layer import LogitsGraph
from minisgl.engine.sampler import draw
from minisgl.engine.segments import block_for, reserve_block
from minisgl.engine.step import (
    MAX_PAGE_UPDATES,
    NO_GRAPHS,
    GraphStep,
    PieceForward,
    PieceGraph,
    StepGraphs,
    StepParts,
)
from minisgl.engine.step_tensors import SamplerWork, StepColumns, empty_batch
from minisgl.engine.warmup import layers_to_rehearse
from minisgl.kernel.dispatch import copy_words
from minisgl.kernel.step import StepLayout
from minisgl.models.layer import Attended

# Takes rising sizes and the title of a progress bar, and yields the sizes in the order of their
# capture. The largest size comes first, so that the tensors of smaller graphs reuse its memory.
LargestFirst = Callable[[Sequence[Any], str], Iterable[Any]]
_STEP = 32  # distance between sizes above 16 (bench/notebook/2026-11-26-starts.md)


class DecodeShape(NamedTuple):
    """The requests of a decode step, and the tokens that each of them forwards."""

    reqs: int
    width: int


def graph_shapes(largest: int, drafting: bool) -> list[DecodeShape]:
    """Return the shapes to capture, in the reverse order of their capture.

    Steps of one token for each request have up to `largest` requests: 1, 2, 4, 8, 16, then
    multiples of 32. Steps with drafts have the same numbers of requests while they have at most
    MAX_DRAFT_TOKENS tokens. They come first, so that the largest shape without drafts is captured
    first.
    """
    sizes = [size for size in (1, 2, 4, 8, 16) if size < largest]
    sizes = [*sizes, *range(_STEP, largest, _STEP), largest] if largest > 0 else []
    return [
        DecodeShape(size, width)
        for width in (DRAFT_WIDTHS[::-1] if drafting else DRAFT_WIDTHS[:1])
        for size in sizes
        if width == 1 or size * width <= MAX_DRAFT_TOKENS
    ]


def capture_steps(
    parts: StepParts,
    shapes: Sequence[DecodeShape],
    token_sizes: Sequence[int],
    largest_first: LargestFirst,
) -> StepGraphs:
    """Capture decode steps of these shapes, and pieces of these numbers of tokens.

    Captures on the current stream, and blocks the host. Returns no graphs if the attention backend
    cannot be captured.
    """
    memory: Any = torch.cuda.graph_pool_handle()
    rehearsed = layers_to_rehearse(parts.runner)
    decode = _DecodeCapture(parts, shapes, rehearsed, memory)
    steps: list[GraphStep] = []
    for shape in largest_first(shapes, "capturing decode graphs"):
        step = decode.capture(shape)
        if step is None:
            return NO_GRAPHS
        steps.insert(0, step)
    runner, largest = parts.runner, max(token_sizes, default=0)
    rows = len(runner.padding)
    shared = torch.zeros((rows, largest), dtype=torch.int32, device=runner.device)
    pieces: list[PieceForward] = []
    for size in largest_first(token_sizes, "capturing piecewise graphs"):
        tokens = torch.as_strided(shared, (rows, size), (size, 1))
        pieces.insert(0, capture_pieces(parts, tokens, rehearsed, memory))
    return StepGraphs(tuple(steps), tuple(pieces), tuple(decode.logits_graphs[::-1]))


def capture(run: Callable[[], object], rehearse: Callable[[], object], memory: Any) -> Any:
    """Return a torch.cuda.CUDAGraph of `run`. rehearse: launches the same kernels.

    The rehearsal compiles and loads the kernels. In it, libraries choose their algorithms and
    allocate their workspaces.
    """
    rehearse()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool=memory, capture_error_mode="thread_local")
    run()
    graph.capture_end()
    return graph


class _DecodeCapture:
    """Captures decode steps over one set of buffers.

    logits_graphs: in the order of their capture, one for each shape of width 1. None if a
                   stage reads_hidden.
    """

    def __init__(
        self, parts: StepParts, shapes: Sequence[DecodeShape], rehearsed: int, memory: Any
    ) -> None:
        self._parts, self._rehearsed, self._memory = parts, rehearsed, memory
        runner, head = parts.runner, parts.runner.model.lm_head
        largest = max(shape.reqs for shape in shapes)
        most_tokens = max(shape.reqs * shape.width for shape in shapes)
        rows = max(parts.finish.result_rows(shape.width) * shape.reqs for shape in shapes)
        words = StepLayout(largest, runner.packer.columns).words

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=runner.device)

        self._buffer = zeros(words + 3 * MAX_PAGE_UPDATES)
        self._tokens = zeros(len(runner.padding), most_tokens)
        self._logits = zeros(most_tokens, head.shard.local, dtype=head.weight.dtype)
        self._results = zeros(rows)
        self._attended = runner.model.model.empty_attended(largest)
        self.logits_graphs: list[LogitsGraph] = []

    def capture(self, shape: DecodeShape) -> GraphStep | None:
        """Return the graphs of a shape; None if the attention backend cannot be captured."""
        parts, runner = self._parts, self._parts.runner
        size, width = shape
        num_tokens = size * width
        layout = StepLayout(size, runner.packer.columns)
        packed = runner.packer.pack(empty_batch(), layout, width)
        views = layout.views(self._buffer[: layout.words].copy_(packed.buffer))
        columns = StepColumns(views, size, width)
        step = runner.attention_step(columns, np.zeros_like(packed.start), packed.lengths)
        attention = runner.attention.decode_graph(size, step)
        if attention is None:
            return None
        token_rows = len(runner.padding)
        tokens = torch.as_strided(self._tokens, (token_rows, num_tokens), (num_tokens, 1))
        no_chunk, logits = views.rows[:0], self._logits[:num_tokens]
        rows = parts.finish.result_rows(width)
        result = self._results[: rows * size].view(rows, size)

        def forward(most_layers: int | None = None) -> None:
            for stage in parts.stages:
                stage.captured(columns)
            attention.compute_metadata()
            states = runner.begin_states(columns, num_tokens)
            runner.stage(columns, no_chunk, tokens)
            attended = runner.run(tokens, attention, most_layers, states)
            hidden = runner.model.model.finish_last_layer(attended)
            runner.model.lm_head.logits(hidden, out=logits)
            for stage in parts.stages:
                stage.forwarded(columns, tokens, hidden)

        def sample(filters: bool) -> None:
            work = SamplerWork(any_random=True, filters=filters)
            # A copy by torch would be a memcpy node, which a copy engine may run.
            copy_words(result, draw(runner, parts.finish, columns, work, logits))

        def graph_of(run: Callable[[], object], rehearse: Callable[[], object]) -> Any:
            return capture(run, rehearse, self._memory)

        graph = graph_of(forward, partial(forward, self._rehearsed))
        # A step that computes the hidden states of all its tokens takes the logits from these.
        if width == 1 and not parts.reads_hidden:
            inputs = Attended(*(part[:size] for part in self._attended))

            def last_layer() -> None:
                residual = inputs.residual.clone()
                runner.model.logits(Attended(inputs.heads, residual), out=logits)

            self.logits_graphs.append(LogitsGraph(graph_of(last_layer, last_layer), inputs, logits))
        if width == 1:
            for stage in parts.stages:
                stage.capture(columns, lambda run: graph_of(run, run))
        plain, filtering = partial(sample, False), partial(sample, True)
        return GraphStep(
            parts=parts,
            buffer=self._buffer,
            layout=layout,
            columns=columns,
            attention=attention,
            inputs=tokens,
            graph=graph,
            logits=logits,
            sampler=graph_of(plain, plain),
            filtering_sampler=graph_of(filtering, filtering),
            tokens=result,
        )


class _Cutter:
    """Takes the place of attention during a capture: ends one graph and begins the next.

    graphs: the number of graphs to capture.
    """

    def __init__(self, memory: Any, graphs: int) -> None:
        self._memory, self._graphs = memory, graphs
        self._aliases: dict[object, Tensor] = {}  # most layers use the same memory
        self.pieces: list[PieceGraph] = []
        self.begin()

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        self.graph.capture_end()
        self.pieces.append(PieceGraph(self.graph, layer, self._alias(q), self._alias(out), sinks))
        if len(self.pieces) < self._graphs:
            self.begin()

    def last(self) -> torch.cuda.CUDAGraph | None:
        """End the graph after the last attention, if there is one."""
        if len(self.pieces) == self._graphs:
            return None
        self.graph.capture_end()
        return self.graph

    def _alias(self, tensor: Tensor) -> Tensor:
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._aliases:
            self._aliases[key] = _alias(tensor)
        return self._aliases[key]


class _NoAttention:
    """Takes the place of attention in the run before a capture."""

    def forward(self, layer: int, q: Tensor, out: Tensor, sinks: Tensor | None = None) -> None:
        out.zero_()


def capture_pieces(parts: StepParts, tokens: Tensor, rehearsed: int, memory: Any) -> PieceForward:
    """Capture the graphs between attention calls over `tokens`, int32 [2 + pools, size].

    rehearsed: the number of layers to run before.
    """
    runner, model = parts.runner, parts.runner.model
    column = [[value] for value in runner.padding]
    tokens[:] = torch.tensor(column, dtype=torch.int32, device=runner.device)
    states = None if runner.states is None else runner.states.padding(tokens.shape[1])
    # This run compiles and loads the kernels. In it, libraries choose their algorithms.
    rehearsal = partial(runner.run, tokens, _NoAttention(), rehearsed, states)
    block = block_for(rehearsal, runner.device)
    torch.cuda.current_stream().synchronize()
    ends_with_attention = model.model.layers[-1].ends_with_attention
    cutter = _Cutter(memory, len(model.config.attention) + (not ends_with_attention))
    reserve_block(block, runner.device)  # in the memory of the graphs; none of them uses it yet
    attended = runner.run(tokens, cutter, states=states)
    last = cutter.last()
    return PieceForward(tokens, tuple(cutter.pieces), Attended(*map(_alias, attended)), last)


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
