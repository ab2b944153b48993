"""`HeadDrafts`: drafts by the draft head of the model, made on the device after the sampler."""

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from minisgl.attention.base import InTurn, StepAttention
from minisgl.core import ConfigError
from minisgl.core.columns import SAMPLING_COLUMNS
from minisgl.core.config import MAX_DRAFT_TOKENS
from minisgl.drafts.ngram import NgramDrafts
from minisgl.engine import ModelRunner, Stage, StepColumns, StepTensors
from minisgl.engine.stages import GraphOf
from minisgl.engine.step_tensors import Logits
from minisgl.kernel.hidden import shift_hidden
from minisgl.kernel.sampling import SamplingTensors
from minisgl.layers.hidden import HiddenMemory
from minisgl.models.mtp import DraftHead


class HeadDrafts(Stage):
    """Writes drafts to the token pool, after the newest token of each decode request.

    Each step stores the keys of the draft head for its own tokens, in their slots of the KV pool.
    These keys depend on the tokens of the prefix only, so the prefix cache shares them. After the
    sampler, the head runs Batch.next_drafts times over the newest token of each decode request. Its
    keys of drafts are in the slots of the drafts, where the next step overwrites them.

    The drafts of a long n-gram match replace those of the head (kernel.drafts.find_drafts).

    I1  HiddenMemory.ring has the final hidden states of each row up to the token before its newest
        one, and then those of the head, which stand for the states of drafts.
    """

    reads_hidden: ClassVar[bool] = True

    def __init__(self, runner: ModelRunner) -> None:
        """Raises ConfigError if the engine has loaded no draft head."""
        assert runner.drafts is not None, "the engine must have draft lengths; this is a bug"
        if runner.model.mtp is None:
            raise ConfigError(
                "the extensions run a draft head, but the engine has loaded none; set speculative "
                "to mtp, or build the extensions with drafts.with_speculation"
            )
        assert runner.states is not None, "a draft head has a state; this is a bug"
        memory: HiddenMemory = runner.states.layers[-1]
        self._runner, self._head, self._ring = runner, runner.model.mtp, memory.ring
        self._made = torch.zeros_like(runner.drafts.cached)
        self._ngrams = NgramDrafts(runner, self._made)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, object]] = {}

    def before(self, x: StepTensors) -> None:
        self._ngrams.before(x)

    def captured(self, columns: StepColumns) -> None:
        self._ngrams.captured(columns)

    def forwarded(self, columns: StepColumns, tokens: Tensor, hidden: Tensor) -> None:
        """Store the keys of the tokens. The drafts of earlier steps are no longer needed."""
        lengths = columns.forwarded_lengths()
        before = shift_hidden(self._ring, hidden, columns.views, lengths, tokens[1])
        embedded = self._runner.model.model.embed_tokens(tokens[0])
        self._head.store(embedded, before, self._runner.context(tokens, InTurn(())))
        self._made.index_fill_(0, columns.views.rows.long(), 0)

    def capture(self, columns: StepColumns, graph_of: GraphOf) -> None:
        if columns.num_decode * 2 > MAX_DRAFT_TOKENS:  # these steps have no drafts
            return
        draft = _Draft(self._runner, self._head, self._ring, self._made, columns)
        none = np.zeros(columns.num_decode, dtype=np.int32)
        step = self._runner.attention_step(draft.columns, none, none + 1)
        attention = self._runner.attention.decode_graph(columns.num_decode, step)
        assert attention is not None, "the decode step before was captured; this is a bug"

        def run() -> None:
            draft.place()
            attention.compute_metadata()
            draft.run(attention)

        # The graph uses tensors of `draft` and `attention`.
        self._graphs[columns.num_decode] = graph_of(run), (draft, attention)

    def after(self, x: StepTensors, out: Logits, tokens: Tensor) -> None:
        columns, runner = x.columns, self._runner
        if x.by_graph and x.batch.next_drafts:
            graph, _ = self._graphs[columns.num_decode]
            for _ in range(x.batch.next_drafts):
                graph.replay()
        elif x.batch.next_drafts and columns.num_decode:
            draft = _Draft(runner, self._head, self._ring, self._made, columns)
            # Upper bounds of the positions, as in Batch.start.
            newest = (x.packed.start + x.packed.lengths)[: columns.num_decode]
            for nth in range(x.batch.next_drafts):
                draft.place()
                step = runner.attention_step(draft.columns, newest + nth, np.ones_like(newest))
                draft.run(runner.attention.prepare(step))


class _Draft:
    """One further draft of each decode request of a step, over tensors of fixed addresses.

    columns: the decode requests, each with one token: the newest one, or the newest draft.
    """

    def __init__(
        self, runner: ModelRunner, head: DraftHead, ring: Tensor, made: Tensor, of: StepColumns
    ) -> None:
        """of: the columns of the step. ring, made: of HeadDrafts."""
        assert runner.drafts is not None, "the engine must have draft lengths; this is a bug"
        self._runner, self._head, self._ring, self._made = runner, head, ring, made
        self._cached, views, count = runner.drafts.cached, of.views, of.num_decode
        rows = views.rows[:count]
        start, first = torch.zeros_like(rows), torch.arange(count, device=rows.device).int()
        sampling = {column.name: views.sampling[column.name][:count] for column in SAMPLING_COLUMNS}
        views = views._replace(
            rows=rows,
            start=start,
            lengths=torch.ones_like(rows),
            first=first,
            samples=views.samples[:count],
            deltas=views.deltas[:count],
            sampling=sampling,
        )
        self.columns = StepColumns(views, count, 1)
        self._tokens = rows.new_empty((len(runner.padding), count))

    def place(self) -> None:
        """Write the positions of the tokens to columns.views.start."""
        rows = self.columns.views.rows.long()
        torch.add(self._cached[rows], self._made[rows], out=self.columns.views.start)

    def run(self, attention: StepAttention) -> None:
        """Draw the drafts, each with the noise with which its position will be sampled."""
        runner, model, views = self._runner, self._runner.model, self.columns.views
        rows, position, depth = views.rows.long(), views.start, self._ring.shape[1]
        runner.stage(self.columns, views.rows[:0], self._tokens)
        before = self._ring[rows, ((position - 1) % depth).long()]
        embedded = model.model.embed_tokens(self._tokens[0])
        hidden = self._head.forward(embedded, before, runner.context(self._tokens, attention))
        self._ring[rows, (position % depth).long()] = hidden
        logits = self._head.logits(hidden, model.lm_head)
        params = SamplingTensors(
            **views.sampling, position=position + 1, any_random=True, filters=False
        )
        drawn = model.lm_head.sample(logits.float() if logits.is_cpu else logits, params).tokens
        runner.token_pool[rows, (position + 1).long()] = drawn
        self._made[rows] += 1
