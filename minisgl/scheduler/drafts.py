"""`DraftPlanner`: the draft tokens of a step, and the effect of their results on the next step."""

import numpy as np

from minisgl.core import Batch, Int32Array, StepCost, StepResult
from minisgl.core.batch import DRAFT_WIDTHS, MAX_DRAFT_TOKENS, DraftLengths
from minisgl.message.stats import DraftTotals
from minisgl.scheduler.kv_manager import KVManager
from minisgl.scheduler.request import ReqState


class DraftPlanner:
    """Gives decode requests draft tokens and pages for them.

    The engine finds and checks the drafts on the device, so the host learns one step later how many
    tokens a step gave to a request. Until then it counts all drafts as accepted: table.computed is
    an upper bound, and a request has pages up to it. Nothing is rolled back when drafts are
    rejected. The row keeps its pages, and the next step overwrites the keys and values.

    lengths   chooses the number of drafts.
    totals    drafts and accepted drafts since the start.
    """

    def __init__(self, lengths: DraftLengths, kv_manager: KVManager) -> None:
        assert kv_manager.windows is None, "rows with windows must have no drafts; this is a bug"
        self.lengths = lengths
        self.totals = DraftTotals()
        self._kv_manager = kv_manager
        self._table = kv_manager.table

    def add(self, rows: Int32Array, cost: StepCost | None) -> bool:
        """Set table.step_tokens of decoding rows, and give the rows pages for these tokens.

        rows: int32, all decoding rows. cost: as for DraftLengths.choose. Drafts end before the last
        token that the request may forward. Returns False if the step has no drafts, or if they need
        more pages than are left. step_tokens is then 1.
        """
        table, kv_manager = self._table, self._kv_manager
        table.step_tokens[rows] = 1
        drafting = rows[table.may_draft[rows]]
        if not len(drafting):
            return False
        computed, fitting = table.computed[rows], MAX_DRAFT_TOKENS // len(rows)
        limit = max(width for width in DRAFT_WIDTHS if width <= max(fitting, 1)) - 1
        keys = int(computed.sum())
        most = self.lengths.choose(drafting, len(rows), keys, limit, cost)
        most_tokens = np.where(table.may_draft[rows], 1 + most, 1)
        tokens = np.minimum(most_tokens, table.max_total_tokens[rows] - 1 - computed)
        if tokens.max() == 1:
            return False
        missing = -(-(computed + tokens) // kv_manager.page_size) - table.pages.counts[rows]
        missing = np.maximum(missing, 0)
        pages = kv_manager.try_allocate(int(missing.sum()))
        if pages is None:
            return False
        table.step_tokens[rows] = tokens
        for nth in range(int(missing.max())):
            growing = rows[missing > nth]
            table.pages.append(growing, pages[: len(growing)])
            pages = pages[len(growing) :]
        return True

    def record(self, batch: Batch, result: StepResult) -> None:
        """Take the measured acceptance of a resolved step."""
        assert result.drafted is not None, "a drafting engine must count drafts; this is a bug"
        assert result.agreed is not None, "a drafting engine must count drafts; this is a bug"
        decoding = slice(batch.num_decode)
        rows, lengths = batch.rows[decoding], batch.lengths[decoding]
        table = self._table
        measured = table.rows.allocated[rows] & table.may_draft[rows]
        measured &= batch.step_id > table.dropped_until[rows]
        if not measured.any():
            return
        drafted, agreed = result.drafted[decoding][measured], result.agreed[decoding][measured]
        self.lengths.record(rows[measured], drafted, agreed)
        forwarded = np.minimum(lengths[measured] - 1, drafted)
        for nth in range(int(forwarded.max())):
            self.totals.drafted[nth] += int((forwarded > nth).sum())
            self.totals.accepted[nth] += int((np.minimum(agreed, forwarded) > nth).sum())

    def resumed(self, batch: Batch, decode_rows: Int32Array) -> Int32Array:
        """Return `decode_rows`, and after them the other rows of a resolved step with steps left.

        A row leaves decode_rows while the steps in flight may sample its last token. It comes back
        if they did not, because they rejected drafts.
        """
        table, rows = self._table, batch.rows[: batch.num_decode]
        left = table.computed[rows] < table.max_total_tokens[rows] - 1
        left &= table.rows.allocated[rows] & ~np.isin(rows, decode_rows)
        back = [row for row in rows[left].tolist() if table.req_at(row).state is ReqState.DECODE]
        return np.concatenate([decode_rows, np.array(back, dtype=np.int32)])
