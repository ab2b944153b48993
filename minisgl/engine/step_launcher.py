"""`StepLauncher`: queues the work of one step, from the packed batch to the copy of its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import AttentionStep
from minisgl.core import Batch
from minisgl.engine.cuda_graph import DecodeGraph, DecodeGraphs
from minisgl.engine.drafting import DraftStep, draft_step
from minisgl.engine.logits_processing import Edit, LogitsProcessor, ProcessingStep, TokenMask
from minisgl.engine.logprobs import start_logprobs
from minisgl.engine.model_runner import LaunchedStep, ModelRunner, StepInputs, pack
from minisgl.engine.piecewise_graph import PieceGraphs
from minisgl.engine.sampler import sample_tokens, sampling_kind
from minisgl.kernel import StepViews, apply_token_mask, update_pages


@dataclass(slots=True, eq=False)
class StepLauncher:
    """Launches steps on the current stream, without waiting for the device.

    A step is: copy the packed batch to the device, update the page table, forward, sample, copy the
    tokens back. A step in which every request decodes runs as CUDA graphs. In a step with prompt
    tokens, the work between two attention calls runs as CUDA graphs. Token masks are applied
    between forward and sampler. A step with other edits or log-probabilities samples eagerly.

    runner          the model and its memory.
    processors      logits processors, in the order in which they edit.
    graphs, pieces  CUDA graphs of decode steps, and of steps with prompt tokens; None if none are
                    captured.
    """

    runner: ModelRunner
    processors: Sequence[LogitsProcessor[Any]]
    graphs: DecodeGraphs | None = None
    pieces: PieceGraphs | None = None

    def warm_up_masks(self) -> None:
        """Launch the kernel of token masks for each dtype of logits that it may get."""
        weight = self.runner.model.lm_head.weight
        for dtype in {weight.dtype, torch.float32}:
            logits = torch.zeros((1, 32), dtype=dtype, device=weight.device)
            words = torch.zeros((1, 1), dtype=torch.int32, device=weight.device)
            apply_token_mask(logits, words[0], words, 0)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start the step. On a CPU it is complete when this method returns."""
        runner = self.runner
        graph = None if self.graphs is None else self.graphs.pick(batch)
        size = batch.num_reqs if graph is None else graph.shape.reqs
        inputs = pack(batch, size, runner)
        views = self._send(inputs, graph)
        update_pages(runner.page_table, views.page_rows, views.page_cols, views.page_ids)
        if graph is None:
            drafts = draft_step(runner, views, inputs.num_decode, inputs.width)
        else:
            drafts = graph.drafts
        if drafts is not None:
            drafts.set_lengths(batch)
            # A graph finds the drafts too. The masks need them before the graph ends.
            if graph is None or (batch.logit_edits is not None and inputs.width > 1):
                drafts.find()
        edits = self._prepare_edits(inputs, views, drafts)
        if graph is None:
            hidden, logits = self._forward(inputs, views, drafts)
        else:
            graph.forward.replay()
            hidden, logits = None, graph.logits
        kind = sampling_kind(batch)
        next_tokens = logprobs = None
        masks = [edit for edit in edits if isinstance(edit, TokenMask)]
        if len(masks) == len(edits) and batch.logprobs is None and logits is not None:
            for mask in masks:
                mask(logits, runner.model.lm_head.shard.begin)
            edits = []
        if edits or batch.logprobs is not None:
            if logits is not None:
                logits = runner.model.lm_head.all_gather_logits(logits).float()
                edited = logits.clone() if edits else logits
                for edit in edits:
                    edit(edited)
                next_tokens = sample_tokens(
                    runner, edited, views, kind, gathered=True, drafts=drafts
                )
                if inputs.width > 1 and drafts is not None:
                    logits = logits[drafts.first_rows.long()]
            first_tokens = np.cumsum(inputs.lengths) - inputs.lengths
            logprobs = start_logprobs(
                runner.model, batch, first_tokens, hidden, logits, next_tokens
            )
        elif graph is not None:
            next_tokens = graph.sample(kind.filters)
        elif logits is not None:
            next_tokens = sample_tokens(runner, logits, views, kind, drafts=drafts)
        return LaunchedStep(inputs, next_tokens, logprobs, by_graph=graph is not None)

    def _send(self, inputs: StepInputs, graph: DecodeGraph | None) -> StepViews[Tensor]:
        """Copy the packed buffer to the device; for a graph, to the buffer that the graph reads."""
        if graph is None or self.graphs is None:
            return inputs.layout.views(inputs.packed.to(self.runner.device, non_blocking=True))
        buffer = self.graphs.buffer[: inputs.layout.size]
        return inputs.layout.views(buffer.copy_(inputs.packed, non_blocking=True))

    def _prepare_edits(
        self, inputs: StepInputs, views: StepViews[Tensor], drafts: DraftStep | None
    ) -> list[Edit]:
        """Return the edits of the step, in the order in which they apply."""
        edits: list[Edit] = []
        reqs = inputs.batch.logit_edits
        if reqs is None:
            return edits
        step = ProcessingStep(
            inputs.batch,
            inputs.logit_rows,
            views if drafts is None else drafts.token_views(),
            self.runner.token_pool,
            self.runner.model.config.eos_token_ids,
            self.runner.cached,
            drafts.found if drafts is not None and inputs.width > 1 else None,
        )
        for number, processor in enumerate(self.processors):
            edited = [(req, req.states[number]) for req in reqs if req.states[number] is not None]
            edit = processor.prepare(edited, step) if edited else None
            if edit is not None:
                edits.append(edit)
        return edits

    def _forward(
        self, inputs: StepInputs, views: StepViews[Tensor], drafts: DraftStep | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run the forward without a decode graph.

        Returns the hidden states [T or more, H], or None if no request asks for log-probabilities
        of its prompt. Also returns logits [N, n] of this rank's ids, or None if no request samples.
        With `drafts`, logits has M rows, as DraftStep.token_views.
        """
        runner, batch, num_decode = self.runner, inputs.batch, inputs.num_decode
        num_decode_tokens = num_decode * inputs.width
        num_tokens = num_decode_tokens + batch.num_prefill_tokens
        reqs = views if drafts is None else drafts.forwarded_views()
        on_device = reqs.rows, reqs.start, reqs.lengths, *runner.page_tables
        step = AttentionStep(num_decode, inputs.start, inputs.lengths, *on_device)
        attention = runner.attention.prepare(step)
        piece = None if self.pieces is None else self.pieces.pick(num_tokens)
        if piece is None:
            rows = len(runner.padding)
            tokens = torch.empty((rows, num_tokens), dtype=torch.int32, device=runner.device)
        else:
            tokens = piece.tokens[:, :num_tokens]
        runner.stage(views, num_decode_tokens, tokens)
        if piece is None:
            attended = runner.run(tokens, attention)
        else:
            attended = piece.run(tokens, attention, clear_padding=inputs.width > 1)
        of_prompts = batch.logprobs is not None and (batch.logprobs.prompt >= 0).any()
        samples = batch.samples.any()
        if not (of_prompts or samples):
            return None, None
        model, last = runner.model, views.first + step.device_lengths - 1
        if inputs.width > 1:
            decoded = torch.arange(num_decode_tokens, device=runner.device)
            last = torch.cat((decoded, last[num_decode:]))
        if of_prompts:
            hidden = model.model.finish_last_layer(attended)
            return hidden, model.lm_head.logits(hidden[last]) if samples else None
        attended = attended.take_rows(last, model.lm_head.comm)
        logits = None if self.graphs is None else self.graphs.finish(attended)
        return None, model.logits(attended) if logits is None else logits
