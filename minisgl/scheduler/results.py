"""Reads the result of a completed step: the new tokens, and the requests that end."""

import numpy as np

from minisgl.core import Batch, FinishReason, Int32Array, StepResult
from minisgl.scheduler.request_table import RequestTable


def read_result(
    batch: Batch, result: StepResult, table: RequestTable, eos_token_ids: Int32Array
) -> tuple[Int32Array, Int32Array, dict[int, FinishReason]]:
    """Append the sampled tokens to their rows and find the requests that end.

    Returns three values: the row of each new token, int32 [n]; the new tokens, int32 [n], in the
    same order; and the reason of each row that ends, errors first.

    A row gets no token if its request ended in the previous step, while this step was in flight. It
    gets no token either if forced tokens have taken the positions (table.dropped_until). A row with
    non-finite logits ends with ERROR and gets no token. Draft tokens that the step did not accept
    are subtracted from table.computed. The next step forwards tokens at their positions.
    """
    taken = batch.step_id > table.dropped_until[batch.rows]
    if batch.drafting:
        decoding = np.flatnonzero(taken[: batch.num_decode])
        table.computed[batch.rows[decoding]] -= (batch.lengths - result.counts)[decoding]
    sampled = batch.samples & table.rows.allocated[batch.rows] & taken
    broken = batch.rows[sampled & ~result.finite]
    sampled &= result.finite
    rows: Int32Array = batch.rows[sampled]
    tokens, counts = result.tokens[sampled], result.counts[sampled]
    first = table.known[rows]
    token_rows, tokens, ended = append_tokens(table, rows, first, tokens, counts, eos_token_ids)
    return token_rows, tokens, dict.fromkeys(broken.tolist(), FinishReason.ERROR) | ended


def append_tokens(
    table: RequestTable,
    rows: Int32Array,
    first: Int32Array,
    tokens: Int32Array,
    counts: Int32Array,
    eos_token_ids: Int32Array,
) -> tuple[Int32Array, Int32Array, dict[int, FinishReason]]:
    """Append tokens[i, : counts[i]] to row rows[i] at the positions from first[i] on.

    Returns the same values as read_result. Tokens after the token that ends a request are dropped.
    """
    width = tokens.shape[1]
    nth: Int32Array = np.arange(width, dtype=np.int32)
    position: Int32Array = first[:, None] + nth
    # A token stops its request if it is an EOS id or stop token id that the request obeys.
    stops = (tokens[..., None] == eos_token_ids).any(axis=2) & table.obeys_eos[rows, None]
    for index in np.flatnonzero(table.has_stop_ids[rows]).tolist():
        stop_ids = table.req_at(rows[index]).sampling.stop_token_ids
        stops[index] |= np.isin(tokens[index], stop_ids)
    stops &= position >= table.stop_from[rows, None]
    ends = stops | (position + 1 >= table.max_total_tokens[rows, None])
    if width > 1:
        ends &= nth < counts[:, None]
        ending = ends.any(axis=1)
        counts[ending] = ends[ending].argmax(axis=1) + 1
        kept = nth < counts[:, None]
        token_rows, tokens, token_positions = np.repeat(rows, counts), tokens[kept], position[kept]
    else:
        token_rows, tokens, token_positions = rows, tokens[:, 0], first
    table.tokens[token_rows, token_positions] = tokens
    table.known[rows] = first + counts
    ended = {}
    for index in np.flatnonzero(ends.any(axis=1)).tolist():
        stopped = stops[index, counts[index] - 1]
        ended[int(rows[index])] = FinishReason.STOP if stopped else FinishReason.LENGTH
    return token_rows, tokens, ended
