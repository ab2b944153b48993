"""`Results`: reads the results of steps. Requests end, are preempted or pause because of them."""

from collections import deque
from collections.abc import Callable

import numpy as np

from minisgl.core import EngineError, FinishReason, GrammarFailed, MinisglError
from minisgl.core.batch import Batch, StepResult
from minisgl.message.messages import SchedulerStats, StepOutput
from minisgl.scheduler.apply import enqueue, rejoin, remove
from minisgl.scheduler.forced import append_forced
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.preparation import PreparationQueue
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.request_table import NewTokens
from minisgl.scheduler.stats import InFlight, StepMeter
from minisgl.scheduler.view import View


class Results:
    """Appends the tokens of steps, and takes rows and pages from requests.

    in_flight  the launched steps whose results are not read, the oldest first.
    outputs    the output of the present iteration.
    reqs       the open requests by uid. A request leaves with its Finished message.
    due        requests to end or preempt once the step in flight that contains them is resolved.
    """

    def __init__(
        self,
        view: View,
        preparations: PreparationQueue,
        meter: StepMeter,
        totals: SchedulerStats,
        send: Callable[[StepOutput], object],
    ) -> None:
        """send: takes the output of an iteration and must not block."""
        self._view, self._meter, self._totals, self._send = view, meter, totals, send
        self._preparations = preparations
        self.outputs = OutputBuilder(view.table, totals)
        self.in_flight: deque[InFlight] = deque()
        self.reqs: dict[int, Req] = {}
        self.due: list[Req] = []

    # --- the results of steps -------------------------------------------------------------------

    def drain(self, keep: int = 0) -> None:
        """Read the results of launched steps, except for the last `keep`, and send the output."""
        table, outputs = self._view.table, self.outputs
        steps = table.steps
        while len(self.in_flight) > keep:
            step = self.in_flight.popleft()
            batch, result = step.batch, step.pending.wait()
            self._meter.record_result(step, result)
            steps.resolved = batch.step_id
            for holder in [*steps.waiting]:
                holder.resolve()
            prefilled = self._prefilled(batch) if len(batch.chunk_ids) else []
            new = table.read_result(batch, result)
            for req in prefilled:
                self._open_output(req, new)
            if batch.drafting:
                self._read_drafts(batch, result, new)
            for wanted in batch.logprobs:
                outputs.logprobs(wanted, batch, result, new.rows)
            outputs.tokens(new)
            if new.ended:
                self._end_rows(new.ended)
            for req in prefilled:
                self._publish(req)
            if self.due:
                self._end_due()
            if batch.logit_edits:
                self._read_constraints(batch, new)
        if (output := outputs.take(steps.resolved)) is not None:
            self._send(output)

    def _prefilled(self, batch: Batch) -> list[Req]:
        """Return the requests whose last chunk the batch contains, if they have not ended."""
        chunks = slice(batch.num_decode, None)
        rows = batch.rows[chunks][batch.samples[chunks]].tolist()
        return [req for row in rows if (req := self._view.table.reqs[row]) is not None]

    def _open_output(self, req: Req, new: NewTokens) -> None:
        """Report a complete prompt, unless its logits are not finite."""
        if not req.prefill_done and new.ended.get(req.row) is not FinishReason.ERROR:
            self._totals.prompt_tokens_total += req.prompt_len
            self._totals.cached_tokens_total += req.cached_tokens
            self._totals.known_tokens_total += req.known_tokens
            self.outputs.open(req)

    def _publish(self, req: Req) -> None:
        """Let other requests use the KV of a complete prompt.

        A prompt with non-finite logits has ended, and is not in `unpublished`. Neither is a request
        whose chunk held forced tokens.
        """
        view = self._view
        if req in view.unpublished:
            del view.unpublished[req]
            view.memory.publish(req.row, req, int(view.table.prefill_end[req.row]))

    def _read_drafts(self, batch: Batch, result: StepResult, new: NewTokens) -> None:
        """Count the accepted drafts of a step. Its ended requests still own their rows."""
        drafted, agreed, predicted = result.drafted, result.agreed, result.predicted
        assert drafted is not None, "a drafting engine must count drafts; this is a bug"
        assert agreed is not None, "a drafting engine must count drafts; this is a bug"
        assert predicted is not None, "a drafting engine must count drafts; this is a bug"
        assert batch.made is not None, "a drafting scheduler must count drafts; this is a bug"
        for index in np.flatnonzero(predicted & (agreed > 0)).tolist():
            row = int(batch.rows[index])
            self.outputs.predicted(row, min(int(agreed[index]), int((new.rows == row).sum())))
        decoding, table, totals = slice(batch.num_decode), self._view.table, self._totals.drafts
        rows, lengths = batch.rows[decoding], batch.lengths[decoding]
        measured = table.rows.allocated[rows] & table.may_draft[rows]
        measured &= (batch.step_id > table.dropped_until[rows]) & ~np.isin(rows, [*new.ended])
        if measured.any():
            drafted, agreed = drafted[decoding][measured], agreed[decoding][measured]
            self._view.lengths.record(rows[measured], drafted, agreed, batch.made[measured])
            forwarded = np.minimum(lengths[measured] - 1, drafted)
            for nth in range(int(forwarded.max())):
                totals.drafted[nth] += int((forwarded > nth).sum())
                totals.accepted[nth] += int((np.minimum(agreed, forwarded) > nth).sum())
        rejoin(self._view, rows)

    def _read_constraints(self, batch: Batch, new: NewTokens) -> None:
        """Append forced tokens after those of a step, and pause the requests with slow edits.

        The requests that the step ends have ended before. A paused request skips the steps until
        its next edit is prepared. It keeps its row and pages, and no step in flight has it. A
        request that forwards forced tokens does not pause.
        """
        view, table = self._view, self._view.table
        forced = append_forced(new.rows, view)
        self._totals.constraints.forced_tokens += len(forced.rows)
        self.outputs.tokens(forced)
        self._end_rows(forced.ended)
        # The step in flight may have the last chunk of a prompt, and this step an earlier one.
        last = table.last_step[batch.rows] == batch.step_id
        for row in batch.rows[table.slow[batch.rows] & last].tolist():
            req = table.reqs[row]
            if req is not None and req.state is ReqState.DECODE:
                req.tokens = table.tokens[row, : table.known[row]].copy()
                view.paused[req] = None
                self._preparations.again(req)

    # --- the ends of requests -------------------------------------------------------------------

    def abort(self, req: Req, reason: FinishReason) -> None:
        """End a request in any state."""
        req.end_reason = reason
        if req in self._view.loading:
            del self._view.loading[req]
        elif req.state is ReqState.PREPARING:
            self._preparations.withdraw(req)
        elif req.state is ReqState.WAITING:
            self._view.waiting.remove(req)
        self.end_when_resolved(req)

    def end_when_resolved(self, req: Req, error: MinisglError | None = None) -> None:
        """End or preempt `req`: now, or once the step in flight that contains it has a result.

        error: of a request that no step in flight contains.
        """
        if req.row < 0:
            self._finish(req, error)
            return
        remove(self._view, req)
        if int(self._view.table.last_step[req.row]) <= self._view.table.steps.resolved:
            self._release(req, error)
        elif req not in self.due:
            self.due.append(req)

    def _end_due(self) -> None:
        """End the requests that waited for the step that has just been resolved."""
        due, self.due = self.due, []
        for req in due:
            if req.state is not ReqState.FINISHED:  # a token of this step may have ended it
                self.end_when_resolved(req)

    def _end_rows(self, ended: dict[int, FinishReason]) -> None:
        """End the requests of these rows, whose last token is known.

        A step in flight may still contain them: their pages are fenced (Scheduler I2).
        """
        table = self._view.table
        for row, reason in ended.items():
            req, known = table.req_at(row), int(table.known[row])
            failed = reason is FinishReason.ERROR
            if failed and req.constraint.prepares and req.failed_at != known:
                # The mask of this position was not ready, or allows no token. The request is
                # preempted, and its constraint prepares the mask.
                req.failed_at = known
                table.drop_in_flight(np.array([row], dtype=np.int32))
                self.end_when_resolved(req)
                continue
            req.end_reason = reason
            error: MinisglError | None = req.constraint.failure(known) if failed else None
            if failed and error is None:
                self._totals.nonfinite_rows_total += 1
                error = EngineError("the model produced non-finite logits")
            remove(self._view, req)
            self._release(req, error)

    def _finish(self, req: Req, error: MinisglError | None = None) -> None:
        """Send the Finished message of a request that owns no row. error: if it failed."""
        if isinstance(error, GrammarFailed):
            failures, code = self._totals.constraints.failures, error.code or ""
            failures[code] = failures.get(code, 0) + 1
        req.state = ReqState.FINISHED
        del self.reqs[req.uid]
        if req.images:
            self._view.images.end(req, self.reqs.values())
        self.outputs.finish(req, error)

    def _release(self, req: Req, error: MinisglError | None = None) -> None:
        """Take the row and the pages from `req`.

        A preempted request then waits again; any other request has finished. error: set if the
        request failed.
        """
        view, table, row = self._view, self._view.table, req.row
        # The prompt is cached only if the first output token is known. Only then is it known that
        # the logits are finite. Tokens that no resolved step has forwarded are not cached either:
        # the tokens of a decode step in flight, and forced tokens. The newest known token is one of
        # them, because the next decode step forwards it first.
        cacheable = error is None and table.known[row] > table.prefill_end[row]
        forwarded = int(table.computed[row]) - int(table.last_step[row] > table.steps.resolved)
        forwarded = min(forwarded, int(table.known[row]) - 1)
        view.memory.release(row, req, forwarded if cacheable else 0)
        table.close_row(req)
        if req.end_reason is not None:
            self._finish(req, error)
        elif req.uid in self._preparations.preparing:  # it was paused
            self._totals.preemptions_total += 1
            req.state = ReqState.PREPARING
        elif req.failed_at == len(req.tokens):
            self._preparations.again(req)
        else:
            self._totals.preemptions_total += 1
            enqueue(view, req)
