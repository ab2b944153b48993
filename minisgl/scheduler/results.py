"""What a completed step means for its reqs: which tokens are real and who ends."""

from typing import NamedTuple

import numpy as np

from minisgl.core import Batch, FinishReason, Int32Array, StepResult
from minisgl.scheduler.request_table import RequestTable


class Outcome(NamedTuple):
    """rows int32 [N] that got the token tokens int32 [N]; ended: row -> reason, in row order."""

    rows: Int32Array
    tokens: Int32Array
    ended: dict[int, FinishReason]


def read_result(
    batch: Batch, result: StepResult, table: RequestTable, eos_token_ids: Int32Array
) -> Outcome:
    """Append the sampled tokens to their rows and find who ends.

    Rows that no longer belong to a req (they ended in the step before, while this one was in
    flight) are passed over: their token is junk. A row with non-finite logits ends with ERROR and
    gets no token.
    """
    sampled = batch.samples & table.rows.allocated[batch.rows]
    broken = batch.rows[sampled & ~result.finite]
    sampled &= result.finite
    rows, tokens = batch.rows[sampled], result.tokens[sampled]
    position = batch.start[sampled] + batch.lengths[sampled]
    table.tokens[rows, position] = tokens
    table.known[rows] = position + 1
    # where the token is an EOS id or a stop token id that counts for its req
    stops = (tokens[:, None] == eos_token_ids).any(axis=1) & table.obeys_eos[rows]
    for index in np.flatnonzero(table.has_stop_ids[rows]).tolist():
        stops[index] |= int(tokens[index]) in table.req_at(rows[index]).sampling.stop_token_ids
    stops &= position >= table.stop_from[rows]
    at_limit = position + 1 >= table.limit[rows]
    ended = dict.fromkeys(broken.tolist(), FinishReason.ERROR)
    for index in np.flatnonzero(stops | at_limit).tolist():
        reason = FinishReason.STOP if stops[index] else FinishReason.LENGTH
        ended[int(rows[index])] = reason
    return Outcome(rows, tokens, ended)
