"""Requests whose edits are slow skip the steps until their next edit is prepared."""

import numpy as np

from minisgl.core import Batch
from minisgl.scheduler.request import Req, ReqState
from minisgl.scheduler.view import View


def pause_slow(view: View, batch: Batch) -> list[Req]:
    """Pause the requests of a resolved batch whose edits are slow, and return them.

    They keep their rows and pages, and no step in flight has them (apply.record_launch). A request
    that forwards forced tokens does not pause.
    """
    table, paused = view.table, []
    for row in batch.rows[table.slow[batch.rows]].tolist():
        req = table.reqs[row]
        if req is not None and req.state is ReqState.DECODE:
            req.tokens = table.tokens[row, : table.known[row]].copy()
            view.paused[req] = None
            paused.append(req)
    return paused


def resume(view: View, req: Req) -> None:
    """Let a paused request decode again."""
    del view.paused[req]
    view.table.slow[req.row] = req.slow
    view.decode_rows = np.concatenate([view.decode_rows, np.array([req.row], dtype=np.int32)])
    req.state = ReqState.DECODE
