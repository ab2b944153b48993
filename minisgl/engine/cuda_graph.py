"""CUDA graphs of decode steps: for each number of requests and each number of tokens of a request,
one forward and two samplers.

A further graph for each number of requests computes the logits from the output of the last
attention. Steps with prompts use it, because cuBLAS takes 0.1 s to load kernels for a number of
rows that it sees for the first time. All graphs share one memory pool and run one after the other
on the engine's stream.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep, DecodeGraphAttention
from minisgl.core import Batch
from minisgl.core.batch import DRAFT_WIDTHS, MAX_DRAFT_TOKENS
from minisgl.engine.drafting import DraftStep, draft_step
from minisgl.engine.model_runner import ModelRunner, pad, result_rows
from minisgl.engine.rehearsal import layers_to_rehearse
from minisgl.engine.sampler import SamplingKind, sample_tokens
from minisgl.kernel import StepLayout
from minisgl.models.decoder import Attended

# Takes rising sizes and the title of a progress bar, and yields the sizes in the order of their
# capture. The largest size comes first, so that the tensors of smaller graphs reuse its memory.
LargestFirst = Callable[[Sequence[Any], str], Iterable[Any]]
_STEP = 32  # distance between sizes above 16 (docs/measurements.md, "Sizes of graphs")
_MAX_PAGE_UPDATES = 4096  # in one graph step; a request usually needs no or one update


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


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """A decode step of a fixed shape, over tensors at fixed addresses.

    It reads its inputs from DecodeGraphs.buffer. `size` is shape.reqs.

    drafts       the parts of a step with drafts; None for an engine without drafts.
    attention    kept alive because the graphs read its tensors.
    forward      writes `logits`, [size * shape.width, n], for the n vocabulary ids of this rank.
    finish       writes `logits` for the first `size` rows of DecodeGraphs.attended; None if
                 shape.width is above 1.
    sampler      samples from `logits` without filters, and writes `next_tokens`.
    filtering_sampler
                 like `sampler`, but with top_k, top_p and min_p.
    next_tokens  int32 [2 or more, size], as sampler.sample_tokens returns it.
    """

    shape: DecodeShape
    drafts: DraftStep | None
    attention: DecodeGraphAttention
    forward: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph | None
    logits: Tensor
    sampler: torch.cuda.CUDAGraph
    filtering_sampler: torch.cuda.CUDAGraph
    next_tokens: Tensor

    def sample(self, filters: bool) -> Tensor:
        """Sample from `logits`, and return next_tokens."""
        (self.filtering_sampler if filters else self.sampler).replay()
        return self.next_tokens


class DecodeGraphs:
    """The graphs of all sizes, over one set of buffers.

    buffer     int32 on the device; the packed buffer of a decode step is copied to its beginning.
    attended   the input of DecodeGraph.finish, with rows for the largest size.
    memory     the memory pool that all graphs share.
    rehearsed  the number of layers that run before a capture.
    graphs     in the order of graph_shapes; empty if the attention backend cannot be captured.
    """

    def __init__(
        self, runner: ModelRunner, shapes: Sequence[DecodeShape], largest_first: LargestFirst
    ) -> None:
        """Capture graphs of these shapes on the current stream. Blocks the host."""
        self._runner = runner
        largest = max((shape.reqs for shape in shapes), default=0)
        most_tokens = max((shape.reqs * shape.width for shape in shapes), default=0)
        device = runner.device
        capacity = StepLayout(largest, _MAX_PAGE_UPDATES, 0, runner.columns).size
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        token_rows = len(runner.padding)
        self._tokens = torch.zeros((token_rows, most_tokens), dtype=torch.int32, device=device)
        width, dtype = runner.model.lm_head.shard.local, runner.model.lm_head.weight.dtype
        self._logits = torch.zeros((most_tokens, width), dtype=dtype, device=device)
        most_results = max(result_rows(shape.width) * shape.reqs for shape in shapes)
        self._next_tokens = torch.zeros(most_results, dtype=torch.int32, device=device)
        self.attended = runner.model.model.empty_attended(largest)
        self.memory: Any = torch.cuda.graph_pool_handle()
        self.rehearsed = layers_to_rehearse(runner)
        self.graphs: list[DecodeGraph] = []
        for shape in largest_first(shapes, "capturing decode graphs"):
            graph = self._make(shape)
            if graph is None:
                break
            self.graphs.insert(0, graph)

    def pick(self, batch: Batch) -> DecodeGraph | None:
        """Return the smallest graph that can run this step; None if no graph can.

        A graph runs steps in which every request decodes.
        """
        if batch.num_decode < batch.num_reqs or len(batch.page_updates.ids) > _MAX_PAGE_UPDATES:
            return None
        return self._at_least(batch.num_reqs, batch.width)

    def finish(self, attended: Attended) -> Tensor | None:
        """Compute the logits of the rows that sample, from the output of the last attention.

        Returns None if no graph is large enough. The next graph that runs overwrites the logits.
        """
        rows = len(attended.heads)
        graph = self._at_least(rows, width=1)
        if graph is None or graph.finish is None:
            return None
        for target, part in zip(self.attended, attended, strict=True):
            target[:rows] = part
        graph.finish.replay()
        return graph.logits[:rows]

    def _at_least(self, size: int, width: int) -> DecodeGraph | None:
        fitting = (graph for graph in self.graphs if graph.shape.width == width)
        return next((graph for graph in fitting if graph.shape.reqs >= size), None)

    def _make(self, shape: DecodeShape) -> DecodeGraph | None:
        runner, (size, width) = self._runner, shape
        num_tokens = size * width
        layout = StepLayout(size, 0, 0, runner.columns)
        host = torch.zeros(layout.size, dtype=torch.int32)
        lengths = pad(layout.host_views(host.numpy()), 0, runner, size, width)
        views = layout.views(self.buffer[: layout.size].copy_(host))
        drafts = draft_step(runner, views, size, width)
        # A graph of width 1 reads views.lengths: 1 for each request, also for the padding.
        reqs = views if drafts is None else drafts.forwarded_views()
        on_device = reqs.rows, reqs.start, reqs.lengths, *runner.page_tables
        step = AttentionStep(size, np.zeros_like(lengths), lengths, *on_device)
        attention = runner.attention.decode_graph(size, step)
        if attention is None:
            return None
        token_rows = len(runner.padding)
        tokens = torch.as_strided(self._tokens, (token_rows, num_tokens), (num_tokens, 1))
        logits = self._logits[:num_tokens]
        rows = 2 if drafts is None else result_rows(width)
        next_tokens = self._next_tokens[: rows * size].view(rows, size)

        def forward(most_layers: int | None = None) -> None:
            if drafts is not None:
                drafts.find()
            attention.compute_metadata()
            runner.stage(views, num_tokens, tokens)
            runner.model.logits(runner.run(tokens, attention, most_layers), out=logits)

        def finish() -> None:
            heads, residual = (part[:size] for part in self.attended)
            runner.model.logits(Attended(heads, residual.clone()), out=logits)

        def sample(filters: bool) -> None:
            kind = SamplingKind(any_random=True, filters=filters)
            next_tokens.copy_(sample_tokens(runner, logits, views, kind, drafts=drafts))

        return DecodeGraph(
            shape=shape,
            drafts=drafts,
            attention=attention,
            forward=self._capture(forward, partial(forward, self.rehearsed)),
            finish=self._capture(finish) if width == 1 else None,
            logits=logits,
            sampler=self._capture(partial(sample, False)),
            filtering_sampler=self._capture(partial(sample, True)),
            next_tokens=next_tokens,
        )

    def _capture(
        self, run: Callable[[], object], rehearsal: Callable[[], object] | None = None
    ) -> torch.cuda.CUDAGraph:
        """Capture `run`, after a rehearsal that launches the same kernels.

        rehearsal: None to use `run` itself.
        """
        # The rehearsal compiles and loads the kernels. In it, libraries choose their algorithms and
        # allocate their workspaces.
        (rehearsal or run)()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
        run()
        graph.capture_end()
        return graph
