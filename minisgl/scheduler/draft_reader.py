"""`DraftReader`: the measured acceptance of drafts, from the results of steps."""

import numpy as np

from minisgl.core import Batch, StepResult
from minisgl.message.stats import DraftTotals
from minisgl.scheduler.apply import rejoin
from minisgl.scheduler.outputs import OutputBuilder
from minisgl.scheduler.request_table import NewTokens
from minisgl.scheduler.view import View


class DraftReader:
    """Reads the results of steps with drafts. A scheduler without drafts has none."""

    def __init__(self, view: View, outputs: OutputBuilder, totals: DraftTotals) -> None:
        self._view, self._outputs, self._totals = view, outputs, totals

    def read(self, batch: Batch, result: StepResult, new: NewTokens) -> None:
        """Count the accepted drafts of a step. Its ended requests still own their rows."""
        drafted, agreed, predicted = result.drafted, result.agreed, result.predicted
        assert drafted is not None, "a drafting engine must count drafts; this is a bug"
        assert agreed is not None, "a drafting engine must count drafts; this is a bug"
        assert predicted is not None, "a drafting engine must count drafts; this is a bug"
        assert batch.made is not None, "a drafting scheduler must count drafts; this is a bug"
        for index in np.flatnonzero(predicted & (agreed > 0)).tolist():
            row = int(batch.rows[index])
            self._outputs.predicted(row, min(int(agreed[index]), int((new.rows == row).sum())))
        decoding, table = slice(batch.num_decode), self._view.table
        rows, lengths = batch.rows[decoding], batch.lengths[decoding]
        measured = table.rows.allocated[rows] & table.may_draft[rows]
        measured &= (batch.step_id > table.dropped_until[rows]) & ~np.isin(rows, [*new.ended])
        if measured.any():
            drafted, agreed = drafted[decoding][measured], agreed[decoding][measured]
            self._view.lengths.record(rows[measured], drafted, agreed, batch.made[measured])
            forwarded = np.minimum(lengths[measured] - 1, drafted)
            for nth in range(int(forwarded.max())):
                self._totals.drafted[nth] += int((forwarded > nth).sum())
                self._totals.accepted[nth] += int((np.minimum(agreed, forwarded) > nth).sum())
        rejoin(self._view, rows)
