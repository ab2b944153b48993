"""Forced tokens: the constraint of a request allows no other token at their positions."""

from itertools import zip_longest

import numpy as np

from minisgl.core.batch import Int32Array
from minisgl.scheduler.apply import recompute
from minisgl.scheduler.request import ReqState
from minisgl.scheduler.request_table import NewTokens
from minisgl.scheduler.view import View

# The extra time of a step with a chunk, as a share of a decode-only step (approximate).
CHUNK_SLOWDOWN = 0.5


def append_forced(sampled_rows: Int32Array, view: View) -> NewTokens:
    """Append the tokens that must follow the sampled tokens.

    The next step forwards the appended tokens of a request as one chunk. A step that is
    already in flight also samples tokens for the first of these positions; `read_result` drops
    them. That step forwards the newest token, so the chunk begins after it.

    A chunk of k tokens saves k - 1 decode steps of one request. If the next step has no other
    chunk, this chunk also delays every decoding request. Tokens are appended if the saved steps
    outweigh the delay. Tokens that end the request are always appended, because they need no chunk.
    Without enough free pages the tokens are sampled one by one.

    sampled_rows: int32, the rows that got a token in the step just resolved.
    """
    table = view.table
    forced: dict[int, list[int]] = {}
    ending: set[int] = set()
    # With log-probabilities, each token needs the logits of a step. Requests with slow masks get
    # forced tokens: whether a mask is slow depends on the load, and the ids of an answer must not.
    edited = table.edits_logits[sampled_rows] & ~table.has_logprobs[sampled_rows]
    for row in sampled_rows[edited].tolist():
        req = table.reqs[row]
        if req is None or req.state is not ReqState.DECODE:
            continue
        known, limit = int(table.known[row]), int(table.max_total_tokens[row])
        ids = list(req.constraint.forced(table.tokens[row, :known]))[: limit - known]
        obeys_eos = table.obeys_eos[row] and known + len(ids) > table.stop_from[row]
        if ids and (known + len(ids) == limit or (obeys_eos and ids[-1] in table.eos_token_ids)):
            ending.add(row)
        if len(ids) > 1 or row in ending:
            forced[row] = ids
    saved = sum(len(ids) - 1 for ids in forced.values())
    delay = 0.0 if view.prefilling else CHUNK_SLOWDOWN * len(view.decode_rows)
    for row, ids in list(forced.items()):
        tokens = int(table.known[row]) + len(ids)
        if row not in ending and not (saved > delay and view.memory.try_extend(row, tokens)):
            del forced[row]
    if not forced:
        return NewTokens(sampled_rows[:0], sampled_rows[:0], {})
    rows: Int32Array = np.array([*forced], dtype=np.int32)
    counts: Int32Array = np.array([len(ids) for ids in forced.values()], dtype=np.int32)
    columns = [*zip_longest(*forced.values(), fillvalue=0)]
    padded: Int32Array = np.array(columns, dtype=np.int32).T
    table.computed[rows] = np.minimum(table.computed[rows], table.known[rows])
    table.drop_in_flight(rows)
    appended = table.append_tokens(rows, padded, counts)
    for row in forced:
        if row not in appended.ended:
            table.prefill_end[row] = table.known[row]
            recompute(view, table.req_at(row))
    return appended
