"""CUDA graphs of decode steps: for each number of requests, one forward and two samplers.

A further graph for each number of requests computes the logits from the output of the last
attention. Steps with prompts use it, because cuBLAS takes 0.1 s to load kernels for a number of
rows that it sees for the first time. All graphs share one memory pool and run one after the other
on the engine's stream.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import DecodeGraphAttention
from minisgl.core import Batch
from minisgl.engine.model_runner import ModelRunner, pad
from minisgl.engine.sampler import SamplingKind, sample_tokens
from minisgl.kernel import StepLayout
from minisgl.models.decoder import Attended
from minisgl.utils.startup import Progress

_STEP = 16  # distance between sizes; matrix kernels compute tiles of 16 rows or more
_MAX_PAGE_UPDATES = 4096  # in one graph step; a request usually needs no or one update


def graph_sizes(largest: int) -> list[int]:
    """Return the batch sizes to capture, up to `largest`: 1, 2, 4, 8, then multiples of 16."""
    sizes = [size for size in (1, 2, 4, 8) if size < largest]
    return [*sizes, *range(_STEP, largest, _STEP), largest] if largest > 0 else []


def largest_first(sizes: Sequence[int], title: str, show_progress: bool) -> Iterable[int]:
    """Return the sizes in the order of their capture, with their progress.

    The largest size comes first, so that the tensors of smaller graphs reuse its memory.
    """
    bar: Iterable[int] = Progress(
        sorted(sizes, reverse=True), desc=title, disable=not show_progress
    )
    return bar


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """A decode step of `size` requests over tensors at fixed addresses.

    It reads its inputs from DecodeGraphs.buffer.

    attention    kept alive because the graphs read its tensors.
    forward      writes `logits`, [size, n], for the n vocabulary ids of this rank.
    finish       writes `logits` for the first `size` rows of DecodeGraphs.attended.
    plain, filtered
                 the sampler without and with filters: read `logits`, write `next_tokens`.
    next_tokens  int32 [2, size], as sampler.sample_tokens returns it.
    """

    size: int
    attention: DecodeGraphAttention
    forward: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph
    logits: Tensor
    plain: torch.cuda.CUDAGraph
    filtered: torch.cuda.CUDAGraph
    next_tokens: Tensor

    def sample(self, filters: bool) -> Tensor:
        """Sample from `logits`, and return next_tokens."""
        (self.filtered if filters else self.plain).replay()
        return self.next_tokens


class DecodeGraphs:
    """The graphs of all sizes, over one set of buffers.

    buffer    int32 on the device; the packed buffer of a decode step is copied to its beginning.
    attended  the input of DecodeGraph.finish, with rows for the largest size.
    memory    the memory pool that all graphs share.
    graphs    by rising size; empty if the attention backend cannot be captured.
    """

    def __init__(self, runner: ModelRunner, sizes: Sequence[int], show_progress: bool) -> None:
        """Capture graphs of these sizes on the current stream. Blocks the host."""
        self._runner = runner
        largest = max(sizes, default=0)
        device = runner.device
        capacity = StepLayout(largest, _MAX_PAGE_UPDATES, 0, runner.columns).size
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._tokens = torch.zeros((len(runner.padding), largest), dtype=torch.int32, device=device)
        width, dtype = runner.model.lm_head.shard.local, runner.model.lm_head.weight.dtype
        self._logits = torch.zeros((largest, width), dtype=dtype, device=device)
        self._next_tokens = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        self.attended = runner.model.model.empty_attended(largest)
        self.memory: Any = torch.cuda.graph_pool_handle()
        self.graphs: list[DecodeGraph] = []
        for size in largest_first(sizes, "capturing decode graphs", show_progress):
            graph = self._make(size)
            if graph is None:
                break
            self.graphs.insert(0, graph)

    def pick(self, batch: Batch) -> DecodeGraph | None:
        """Return the smallest graph that can run this step; None if no graph can.

        A graph runs steps in which every request decodes one token.
        """
        one_token_each = batch.num_decode == batch.num_reqs == batch.num_decode_tokens
        if not one_token_each or len(batch.page_updates.ids) > _MAX_PAGE_UPDATES:
            return None
        return self._at_least(batch.num_reqs)

    def finish(self, attended: Attended) -> Tensor | None:
        """Compute the logits of the rows that sample, from the output of the last attention.

        Returns None if no graph is large enough. The next graph that runs overwrites the logits.
        """
        rows = len(attended.heads)
        if (graph := self._at_least(rows)) is None:
            return None
        for target, part in zip(self.attended, attended, strict=True):
            target[:rows] = part
        graph.finish.replay()
        return graph.logits[:rows]

    def _at_least(self, size: int) -> DecodeGraph | None:
        return next((graph for graph in self.graphs if graph.size >= size), None)

    def _make(self, size: int) -> DecodeGraph | None:
        runner = self._runner
        layout = StepLayout(size, 0, 0, runner.columns)
        host = torch.zeros(layout.size, dtype=torch.int32)
        pad(layout.host_views(host.numpy()), 0, runner)
        views = layout.views(self.buffer[: layout.size].copy_(host))
        start = np.zeros(size, dtype=np.int32)
        step = runner.attention_step(views, size, start, start + np.int32(1))
        attention = runner.attention.decode_graph(size, step)
        if attention is None:
            return None
        tokens = torch.as_strided(self._tokens, (len(runner.padding), size), (size, 1))
        logits = self._logits[:size]
        next_tokens = self._next_tokens[: 2 * size].view(2, size)

        def forward() -> None:
            attention.compute_metadata()
            runner.stage(views, size, tokens)
            runner.model.logits(runner.run(tokens, attention), out=logits)

        def finish() -> None:
            heads, residual = (part[:size] for part in self.attended)
            runner.model.logits(Attended(heads, residual.clone()), out=logits)

        def sampler(filters: bool) -> Callable[[], object]:
            kind = SamplingKind(any_random=True, filters=filters)
            return lambda: next_tokens.copy_(sample_tokens(runner, logits, views, kind))

        return DecodeGraph(
            size=size,
            attention=attention,
            forward=self._capture(forward),
            finish=self._capture(finish),
            logits=logits,
            plain=self._capture(sampler(filters=False)),
            filtered=self._capture(sampler(filters=True)),
            next_tokens=next_tokens,
        )

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        run()  # compiles kernels; libraries choose their algorithms and allocate their workspaces
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
        run()
        graph.capture_end()
        return graph
