"""A step as a line: `StepLauncher.launch` queues the work of one step on a stream.

A step runs in one of three ways, which differ in the forward and in the end of the sampler:

GraphStep      every request decodes: CUDA graphs of the forward and of the sampler.
PiecewiseStep  some request has prompt tokens: a CUDA graph between every two attention calls.
EagerStep      no graph is large enough, or the device is a CPU.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from minisgl.attention.base import DecodeGraphAttention, StepAttention
from minisgl.core.batch import Batch
from minisgl.core.config import DRAFT_WIDTHS
from minisgl.core.images import ImageLimits
from minisgl.core.page_copier import PageCopier
from minisgl.engine.last_layer import LastLayer, LogitsGraph
from minisgl.engine.launched import LaunchedStep
from minisgl.engine.logits_processing import (
    NO_EDITS,
    Edits,
    LogitsProcessor,
    MaskedRows,
    TokenMask,
    prepare_edits,
)
from minisgl.engine.logprobs import reports_prompts, start_logprobs
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import Finish, draw
from minisgl.engine.stages import Stage
from minisgl.engine.step_tensors import Logits, StepColumns, StepTensors
from minisgl.kernel.dispatch import apply_token_mask, copy_words
from minisgl.kernel.step import StepLayout
from minisgl.models.layer import Attended

MAX_PAGE_UPDATES = 4096  # in one graph step; a request usually needs no or one update

NO_TOKENS = torch.zeros((0, 1), dtype=torch.int32)  # of a step in which no request samples


class StepParts(NamedTuple):
    """The parts of every step of an engine: the model with its memory, the stages and the finish.

    stages  in the order in which they run.
    finish  ends the sampler.
    """

    runner: ModelRunner
    stages: tuple[Stage, ...]
    finish: Finish

    @property
    def reads_hidden(self) -> bool:
        """Whether each step computes the final hidden states of all its tokens."""
        return any(stage.reads_hidden for stage in self.stages)


class Step(Protocol):
    """A way to run a step. `load` is called before `run`."""

    def load(self, batch: Batch) -> StepTensors:
        """Pack the batch, copy it to the device, and update the page table."""

    def run(self, x: StepTensors, edits: Edits) -> tuple[Logits, Tensor]:
        """Queue the stages' captured work, the forward, the edits and the sampler.

        The second result is that of Finish.put, or NO_TOKENS if no request samples. Logits.full is
        set unless edits.local.
        """


class EagerStep:
    """Runs a step of any size, without a graph of its layers; implements Step."""

    def __init__(self, parts: StepParts, last_layer: LastLayer) -> None:
        self._parts, self._runner, self._last_layer = parts, parts.runner, last_layer

    def load(self, batch: Batch) -> StepTensors:
        runner = self._runner
        layout = StepLayout(len(batch.rows), runner.packer.columns)
        packed = runner.packer.pack(batch, layout, batch.width)
        buffer = torch.empty_like(packed.buffer, device=runner.device)
        copy_words(buffer, packed.buffer)
        places, ids, chunk_ids, mixed = torch.split(buffer[layout.words :], packed.sizes)
        runner.page_table.view(-1).scatter_(0, places.view(torch.int64), ids)
        columns = StepColumns(layout.views(buffer), batch.num_decode, batch.width)
        rope = mixed.view(3, -1) if len(mixed) else None
        return StepTensors(batch, packed, columns, chunk_ids, rope, by_graph=False)

    def run(self, x: StepTensors, edits: Edits) -> tuple[Logits, Tensor]:
        out = self._forward(x)
        if not len(out.local):
            return out, NO_TOKENS
        if not edits.local:
            return out, draw_edited(self._parts, x, out, edits)
        for mask in edits.masks:
            mask(out.local, self._runner.model.lm_head.shard.begin)
        work = x.packed.sampler_work
        return out, draw(self._runner, self._parts.finish, x.columns, work, out.local)

    def _forward(self, x: StepTensors) -> Logits:
        runner, columns = self._runner, x.columns
        for stage in self._parts.stages:
            stage.captured(columns)
        step = runner.attention_step(columns, x.packed.start, x.packed.lengths)
        step = step._replace(spans=x.batch.spans)
        tokens, attended = self._attend(x, runner.attention.prepare(step))
        model, sampled = runner.model, columns.views.first + step.device_lengths - 1
        if columns.width > 1:
            decoded = torch.arange(columns.num_decode * columns.width, device=runner.device)
            sampled = torch.cat((decoded, sampled[columns.num_decode :]))
        of_prompts, samples = reports_prompts(x.batch), bool(x.batch.samples.any())
        none = attended.heads.new_empty((0, len(model.lm_head.weight)))
        if not (self._parts.reads_hidden or of_prompts):
            if not samples:
                return Logits(None, none)
            rows = attended.take_rows(sampled, model.lm_head.comm)
            return Logits(None, self._last_layer.logits(rows))
        hidden = model.model.finish_last_layer(attended)
        for stage in self._parts.stages:
            stage.forwarded(columns, tokens, hidden[: tokens.shape[1]])
        return Logits(hidden, model.lm_head.logits(hidden[sampled]) if samples else none)

    def _attend(self, x: StepTensors, attention: StepAttention) -> tuple[Tensor, Attended]:
        """Run the model up to the last attention.

        Returns the T tokens, as ModelRunner.stage writes them, and the result of T rows or more.
        """
        shape = len(self._runner.padding), int(x.packed.lengths.sum())
        tokens = torch.empty(shape, dtype=torch.int32, device=self._runner.device)
        states = self._runner.begin_states(x.columns, shape[1])
        self._runner.stage(x.columns, x.chunk_ids, tokens, x.rope)
        has_images = x.rope is not None
        return tokens, self._runner.run(tokens, attention, states=states, has_images=has_images)


class PieceGraph(NamedTuple):
    """A graph, and the arguments of the attention call that follows it. q, out: [size, Hq, D]."""

    graph: torch.cuda.CUDAGraph
    layer: int
    q: Tensor
    out: Tensor
    sinks: Tensor | None


class PieceForward(NamedTuple):
    """The graphs of one number of tokens.

    tokens    int32 [2 + pools, size], their input. Layers with states also read
              RowStates.requests.
    pieces    one for each layer with attention.
    attended  their result.
    last      the graph of the work after the last attention; None if there is no such work.
    """

    tokens: Tensor
    pieces: tuple[PieceGraph, ...]
    attended: Attended
    last: torch.cuda.CUDAGraph | None = None

    @property
    def size(self) -> int:
        return self.tokens.shape[1]


class PiecewiseStep(EagerStep):
    """Runs a step of at most `size` tokens. The work between two attention calls is a graph.

    I1  The graphs of all sizes share their memory, and views of this memory outlive the captured
        tensors. A graph therefore overwrites earlier results. Work that reads a result must be
        queued on the same stream before the next graph.
    """

    def __init__(self, parts: StepParts, last_layer: LastLayer, piece: PieceForward) -> None:
        super().__init__(parts, last_layer)
        self.size, self._piece = piece.size, piece
        column = [[value] for value in parts.runner.padding]
        self._padding = torch.tensor(column, dtype=torch.int32, device=parts.runner.device)

    def _attend(self, x: StepTensors, attention: StepAttention) -> tuple[Tensor, Attended]:
        """Replay the graphs over the tokens of the step and the padding after them.

        The result has `size` rows, since it includes the padding.

        The attention output of the padding is uninitialised memory. If it holds NaN, the layers
        after it store NaN in the dummy page, as keys and values of the padding. A request with
        drafts reads the dummy page if it forwards more tokens than it has pages for
        (kvcache.page_table). The weight of these keys is zero, but zero times NaN is NaN. No
        other request reads the dummy page. So in a step with drafts this output is set to zeros.

        With tensor parallelism, a rank may hold the residual of only some rows (two shots in
        minisgl.kernel.triton.reduce). The number of rows of the sum decides which rows these are.
        The next sum must therefore have the same number of rows, or Attended.take_rows must first
        gather the rows from all ranks.
        """
        tokens, pieces, attended, last = self._piece
        count = int(x.packed.lengths.sum())
        if count < self.size:
            tokens[:, count:] = self._padding
        self._runner.begin_states(x.columns, count, self.size)
        self._runner.stage(x.columns, x.chunk_ids, tokens[:, :count], x.rope)
        for piece in pieces:
            piece.graph.replay()
            if x.columns.width > 1:
                piece.out[count:] = 0
            attention.forward(piece.layer, piece.q[:count], piece.out[:count], piece.sinks)
        if last is not None:
            last.replay()
        return tokens[:, :count], attended


@dataclass(frozen=True, slots=True, eq=False)
class GraphStep:
    """Runs a decode step of a fixed shape, over tensors at fixed addresses; implements Step.

    buffer       int32 on the device, shared by all shapes; the packed buffer is copied to its
                 beginning.
    layout, columns
                 the columns in the buffer.
    attention, inputs
                 kept alive because the graphs use their memory: the attention, and the ids,
                 positions and slots of the tokens.
    graph        the captured work of the stages and the forward. Writes `logits`.
    logits       [requests * width, n], for the n vocabulary ids of this rank.
    sampler      samples from `logits` without filters, and writes `tokens`.
    filtering_sampler
                 like `sampler`, but with top_k, top_p and min_p.
    tokens       int32, the result of Finish.put.
    """

    parts: StepParts
    buffer: Tensor
    layout: StepLayout
    columns: StepColumns
    attention: DecodeGraphAttention
    inputs: Tensor
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    sampler: torch.cuda.CUDAGraph
    filtering_sampler: torch.cuda.CUDAGraph
    tokens: Tensor

    def load(self, batch: Batch) -> StepTensors:
        runner = self.parts.runner
        packed = runner.packer.pack(batch, self.layout, self.columns.width)
        buffer = self.buffer[: len(packed.buffer)]
        copy_words(buffer, packed.buffer)
        places, ids, chunk_ids, _ = torch.split(buffer[self.layout.words :], packed.sizes)
        runner.page_table.view(-1).scatter_(0, places.view(torch.int64), ids)
        return StepTensors(batch, packed, self.columns, chunk_ids, rope=None, by_graph=True)

    def run(self, x: StepTensors, edits: Edits) -> tuple[Logits, Tensor]:
        self.graph.replay()
        out = Logits(None, self.logits)
        if not edits.local:
            return out, draw_edited(self.parts, x, out, edits)
        for mask in edits.masks:
            mask(self.logits, self.parts.runner.model.lm_head.shard.begin)
        (self.filtering_sampler if x.packed.sampler_work.filters else self.sampler).replay()
        return out, self.tokens


def draw_edited(parts: StepParts, x: StepTensors, out: Logits, edits: Edits) -> Tensor:
    """Gather the logits of all ids, apply the edits to a copy, and sample from it."""
    changes = [edit.compute() if isinstance(edit, TokenMask) else edit for edit in edits.others]
    masks = [change for change in changes if isinstance(change, MaskedRows)]
    for mask in masks:
        mask.withhold(out.local)  # before the gather, so that all ranks see it
    out.full = edited = parts.runner.model.lm_head.all_gather_logits(out.local).float()
    if changes:
        edited = out.full.clone()
    for change in changes:
        change(edited)
    if masks:  # A mask of this rank may cover the NaN of a row that another rank withholds.
        edited.masked_fill_(out.full.isnan().any(dim=1, keepdim=True), torch.nan)
    return draw(parts.runner, parts.finish, x.columns, x.packed.sampler_work, edited, gathered=True)


class StepGraphs(NamedTuple):
    """The steps with CUDA graphs: decode steps in rising order, piecewise steps by rising size."""

    decode: tuple[GraphStep, ...] = ()
    pieces: tuple[PieceForward, ...] = ()
    logits_graphs: tuple[LogitsGraph, ...] = ()


NO_GRAPHS = StepGraphs()


class StepLauncher:
    """Launches steps on a stream, without waiting for the device; as core.EngineLike.

    parts       the parts of all steps.
    processors  logits processors, in the order in which they edit.
    graphs      the CUDA graphs; none on a CPU.
    images      as in core.EngineLike.
    copier      None: the launcher copies no pages (Engine.copier).
    on_stream   a context in which torch queues work on the stream.
    """

    def __init__(
        self,
        parts: StepParts,
        processors: Sequence[LogitsProcessor[Any]],
        on_stream: AbstractContextManager[object],
        graphs: StepGraphs = NO_GRAPHS,
        images: ImageLimits | None = None,
    ) -> None:
        self.runner, self._stages, self._finish = self.parts = parts
        self.processors, self.on_stream, self.graphs = processors, on_stream, graphs
        runner, pool = self.runner, self.runner.pools[0]
        self.num_pages, self.page_size, self.window = pool.num_pages, pool.page_size, runner.window
        self.snapshot_pages = runner.snapshot_pages
        self.copier: PageCopier | None = None
        self.images = images
        self.max_running_reqs, self.max_seq_len = runner.packer.dummy_row, runner.max_seq_len
        self._failed_rows: Callable[[], Collection[int]] = frozenset  # of the previous step
        last_layer = LastLayer(runner.model, graphs.logits_graphs)
        self._eager: Step = EagerStep(parts, last_layer)
        self._pieces = [PiecewiseStep(parts, last_layer, piece) for piece in graphs.pieces]
        # The graph of each number of requests and each largest number of tokens of a request.
        self._decode: dict[tuple[int, int], GraphStep] = {}
        for step in reversed(graphs.decode):
            width = step.columns.width
            lengths = [n for n in range(1, width + 1) if width == _width_of(n)]
            for reqs in range(1, step.layout.reqs + 1):
                self._decode |= {(reqs, length): step for length in lengths}

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start the step. On a CPU it is complete when this method returns."""
        with self.on_stream:
            step = self.pick(batch)
            x = step.load(batch)
            for stage in self._stages:
                stage.before(x)
            if batch.images:  # only `before` reads them; the launched step keeps no pixels
                x = x._replace(batch=replace(batch, images=()))
            edits = self._edits(x) if batch.logit_edits or batch.logprobs else NO_EDITS
            out, tokens = step.run(x, edits)
            for stage in self._stages:
                stage.after(x, out, tokens)
            logprobs = None if edits.local else start_logprobs(self.runner.model, x, out, tokens)
            pinned, copied = self.runner.packer.pinned, None
            host = torch.empty(tokens.shape, dtype=torch.int32, pin_memory=pinned)
            copy_words(host, tokens)
            if pinned:
                copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                copied.record()
        launched = self._finish.launched(x, host, copied, logprobs)
        self._failed_rows = launched.failed_rows
        return launched

    def pick(self, batch: Batch) -> Step:
        """Return the way to run this step: the smallest graph that can, or else the eager step."""
        reqs, num_decode = len(batch.rows), batch.num_decode
        if reqs == num_decode and len(batch.page_updates.ids) <= MAX_PAGE_UPDATES:
            step = self._decode.get((reqs, int(batch.lengths.max())))
            if step is not None:
                return step
        with_images = batch.rope is not None and batch.rope.chunks is not None
        # The graphs of pieces have no DeepStack.
        if not self._pieces or (with_images and self.runner.has_deepstack):
            return self._eager
        tokens = num_decode * batch.width + len(batch.chunk_ids)
        return next((step for step in self._pieces if step.size >= tokens), self._eager)

    def _edits(self, x: StepTensors) -> Edits:
        if x.batch.logit_edits and x.columns.width > 1:
            # The masks need the drafts before the forward, whose captured work finds them too.
            for stage in self._stages:
                stage.captured(x.columns)
        return prepare_edits(self.processors, x, self.runner, self._failed_rows)

    def warm_up_masks(self) -> None:
        """Launch the kernel of token masks for each dtype of logits that it may get."""
        weight = self.runner.model.lm_head.weight
        for dtype in {weight.dtype, torch.float32}:
            logits = torch.zeros((1, 32), dtype=dtype, device=weight.device)
            words = torch.zeros((1, 1), dtype=torch.int32, device=weight.device)
            apply_token_mask(logits, words[0], words, 0)


def _width_of(length: int) -> int:
    """Return the number of tokens that the engine forwards of a request with `length` tokens."""
    return next(width for width in DRAFT_WIDTHS if width >= length)
