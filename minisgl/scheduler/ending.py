"""`Endings`: requests end and are preempted, at once or when the step that contains them ends."""

import numpy as np

from minisgl.core import EngineError, FinishReason, GrammarFailed, MinisglError
from minisgl.message.messages import SchedulerStats
from minisgl.scheduler.apply import enqueue, remove
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.preparation import PreparationQueue
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.view import View


class Endings:
    """Takes rows and pages from requests, and ends them or lets them wait again.

    reqs  the open requests by uid. A request leaves with its Finished message.
    due   requests to end or preempt once the step in flight that contains them is resolved.
    """

    def __init__(
        self,
        view: View,
        outputs: OutputBuilder,
        preparations: PreparationQueue,
        totals: SchedulerStats,
    ) -> None:
        self._view, self._outputs, self._totals = view, outputs, totals
        self._preparations = preparations
        self.reqs: dict[int, Req] = {}
        self.due: list[Req] = []

    def abort(self, req: Req, reason: FinishReason) -> None:
        """End a request in any state."""
        req.end_reason = reason
        if req.state is ReqState.PREPARING:
            self._preparations.withdraw(req)
        elif req.state is ReqState.WAITING:
            self._view.waiting.remove(req)
        self.end_when_resolved(req)

    def end_when_resolved(self, req: Req, error: MinisglError | None = None) -> None:
        """End or preempt `req`: now, or once the step in flight that contains it has a result.

        error: of a request that no step in flight contains.
        """
        if req.row < 0:
            self.finish(req, error)
            return
        remove(self._view, req)
        if int(self._view.table.last_step[req.row]) <= self._view.table.steps.resolved:
            self._release(req, error)
        elif req not in self.due:
            self.due.append(req)

    def end_due(self) -> None:
        """End the requests that waited for the step that has just been resolved."""
        due, self.due = self.due, []
        for req in due:
            if req.state is not ReqState.FINISHED:  # a token of this step may have ended it
                self.end_when_resolved(req)

    def end_rows(self, ended: dict[int, FinishReason]) -> None:
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

    def finish(self, req: Req, error: MinisglError | None = None) -> None:
        """Send the Finished message of a request that owns no row. error: if it failed."""
        if isinstance(error, GrammarFailed):
            failures, code = self._totals.constraints.failures, error.code or ""
            failures[code] = failures.get(code, 0) + 1
        req.state = ReqState.FINISHED
        del self.reqs[req.uid]
        self._outputs.finish(req, error)

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
        view.memory.release(row, req.cache_salt, forwarded if cacheable else 0)
        table.close_row(req)
        if req.end_reason is not None:
            self.finish(req, error)
        elif req.uid in self._preparations.preparing:  # it was paused
            self._totals.preemptions_total += 1
            req.state = ReqState.PREPARING
        elif req.failed_at == len(req.tokens):
            self._preparations.again(req)
        else:
            self._totals.preemptions_total += 1
            enqueue(view, req)
