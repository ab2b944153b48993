"""CUDA graphs of decode steps: one for token gather to logits and two for the sampler, by size.

One more, from the last attention to logits, is for steps with prompts: cuBLAS would load kernels
when a number of rows first came, which takes 0.1 s. All graphs share one memory pool and run one
after the other on the engine's stream.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from minisgl.attention import DecodeGraphAttention
from minisgl.core import Batch
from minisgl.engine.inputs import pad
from minisgl.engine.model_runner import DeviceState
from minisgl.kernel import StepLayout, StepViews
from minisgl.models import Attended

_STEP = 16  # distance of sizes; matrix kernels work on tiles of 16 rows or more
_MOST_PAGE_UPDATES = 4096  # of one decode step that runs as a graph; usual is one a req, or none


def graph_sizes(largest: int) -> list[int]:
    """Batch sizes to capture, up to `largest`: 1, 2, 4, 8, then multiples of 16."""
    sizes = [size for size in (1, 2, 4, 8) if size < largest]
    return [*sizes, *range(_STEP, largest, _STEP), largest] if largest > 0 else []


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGraph:
    """A decode step of `size` reqs over fixed tensors. What it reads lies in DecodeGraphs.buffer.

    attention  held because its tensors are read too.
    forward    writes `logits` [size, n], as LMHead.logits.
    finish     for any step: `logits` of the first tokens of DecodeGraphs.attended.
    plain, filtered   write `chosen` int32 [2, size], as DeviceState.choose, of `logits`.
    """

    size: int
    attention: DecodeGraphAttention
    forward: torch.cuda.CUDAGraph
    finish: torch.cuda.CUDAGraph
    logits: Tensor
    plain: torch.cuda.CUDAGraph
    filtered: torch.cuda.CUDAGraph
    chosen: Tensor


class DecodeGraphs:
    """Graphs of several sizes over one set of fixed buffers.

    buffer    int32 on the device; a decode step's packed inputs go to its beginning.
    attended  of `largest` tokens: what DecodeGraph.finish reads.
    memory    the pool that all of them share.
    graphs    by rising size; empty where the attention backend cannot be captured.
    """

    def __init__(self, state: DeviceState, sizes: Sequence[int], show_progress: bool) -> None:
        self._state = state
        largest = max(sizes, default=0)
        device = state.device
        capacity = StepLayout(largest, _MOST_PAGE_UPDATES, 0).size
        self.buffer = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._tokens = torch.zeros((3, largest), dtype=torch.int32, device=device)
        width, dtype = state.model.lm_head.shard.local, state.model.lm_head.weight.dtype
        self._logits = torch.zeros((largest, width), dtype=dtype, device=device)
        self._chosen = torch.zeros(2 * largest, dtype=torch.int32, device=device)
        self.attended = state.model.model.empty_attended(largest)
        self.memory: Any = torch.cuda.graph_pool_handle()
        self.graphs: list[DecodeGraph] = []
        bar = tqdm(
            sorted(sizes, reverse=True),
            desc="capturing graphs",
            disable=None if show_progress else True,
        )
        for size in bar:
            graph = self._make(size)
            if graph is None:
                break
            self.graphs.insert(0, graph)

    def pick(self, batch: Batch) -> DecodeGraph | None:
        """The smallest graph that can run this step, if it is a decode step."""
        if batch.num_decode < batch.num_reqs or len(batch.page_ids) > _MOST_PAGE_UPDATES:
            return None
        return self._at_least(batch.num_reqs)

    def finish(self, attended: Attended) -> Tensor | None:
        """CausalLM.logits, overwritten by the next graph; None where no graph is large enough."""
        rows = len(attended.heads)
        if (graph := self._at_least(rows)) is None:
            return None
        for place, part in zip(self.attended, attended, strict=True):
            place[:rows] = part
        graph.finish.replay()
        return graph.logits[:rows]

    def _at_least(self, size: int) -> DecodeGraph | None:
        index = bisect_left(self.graphs, size, key=lambda graph: graph.size)
        return self.graphs[index] if index < len(self.graphs) else None

    def _make(self, size: int) -> DecodeGraph | None:
        """On the current stream. Blocks the host."""
        state = self._state
        layout = StepLayout(size, 0, 0)
        views = layout.views(self.buffer[: layout.size])
        host = torch.zeros(layout.size, dtype=torch.int32)
        fields: Any = StepViews._make(view.numpy() for view in layout.views(host))
        pad(fields, 0, state.dummy_row)
        self.buffer[: layout.size].copy_(host)
        start = np.zeros(size, dtype=np.int32)
        step = state.attention_step(views, size, start, start + np.int32(1))
        attention = state.attention.decode_graph(size, step)
        if attention is None:
            return None
        tokens = torch.as_strided(self._tokens, (3, size), (size, 1))
        logits, chosen = self._logits[:size], self._chosen[: 2 * size].view(2, size)

        def forward() -> None:
            attention.describe()
            state.model.logits(state.forward(views, size, tokens, attention), out=logits)

        def finish() -> None:
            heads, residual = (part[:size] for part in self.attended)
            state.model.logits(Attended(heads, residual.clone()), out=logits)

        def sampler(filters: bool) -> Callable[[], object]:
            return lambda: chosen.copy_(state.choose(logits, views, draws=True, filters=filters))

        return DecodeGraph(
            size=size,
            attention=attention,
            forward=self._capture(forward),
            finish=self._capture(finish),
            logits=logits,
            plain=self._capture(sampler(filters=False)),
            filtered=self._capture(sampler(filters=True)),
            chosen=chosen,
        )

    def _capture(self, run: Callable[[], object]) -> torch.cuda.CUDAGraph:
        run()  # compiles, and lets libraries choose their algorithms and get their workspaces
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
        run()
        graph.capture_end()
        return graph
