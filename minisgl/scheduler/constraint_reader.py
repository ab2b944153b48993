"""`ConstraintReader`: appends forced tokens, and pauses the requests whose edits are slow."""

import numpy as np

from minisgl.core import Batch
from minisgl.message.stats import ConstraintTotals
from minisgl.scheduler.ending import Endings
from minisgl.scheduler.forced import append_forced
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.preparation import PreparationQueue
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.request_table import NewTokens
from minisgl.scheduler.view import View


class ConstraintReader:
    """Acts on the results of steps that edit logits: constraints are among the edits."""

    def __init__(
        self,
        view: View,
        outputs: OutputBuilder,
        endings: Endings,
        preparations: PreparationQueue,
        totals: ConstraintTotals,
    ) -> None:
        self._view, self._outputs, self._endings = view, outputs, endings
        self._preparations, self._totals = preparations, totals

    def read(self, batch: Batch, new: NewTokens) -> None:
        """Append forced tokens after those of a step, and pause slow requests.

        The requests that the step ends have ended before.
        """
        forced = append_forced(new.rows, self._view)
        self._totals.forced_tokens += len(forced.rows)
        self._outputs.tokens(forced)
        self._endings.end_rows(forced.ended)
        # The step in flight may have the last chunk of a prompt, and this step an earlier one.
        last = self._view.table.last_step[batch.rows] == batch.step_id
        for row in batch.rows[self._view.table.slow[batch.rows] & last].tolist():
            req = self._view.table.reqs[row]
            if req is not None and req.state is ReqState.DECODE:
                self._pause(req)

    def _pause(self, req: Req) -> None:
        """Let a request whose edits are slow skip the steps until its next edit is prepared.

        It keeps its row and pages, and no step in flight has it (`read`). A request that forwards
        forced tokens does not pause.
        """
        table = self._view.table
        req.tokens = table.tokens[req.row, : table.known[req.row]].copy()
        self._view.paused[req] = None
        self._preparations.again(req)


def resume(view: View, req: Req) -> None:
    """Let a paused request decode again."""
    del view.paused[req]
    view.table.slow[req.row] = req.slow
    view.decode_rows = np.concatenate([view.decode_rows, np.array([req.row], dtype=np.int32)])
    req.state = ReqState.DECODE
