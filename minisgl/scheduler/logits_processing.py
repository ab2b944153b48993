"""The parts of a batch for requests with edited logits, or that ask for log-probabilities."""

import numpy as np
from numpy.typing import NDArray

from minisgl.core.batch import EditedReq, Int32Array, LogprobsRequest
from minisgl.scheduler.request_table import RequestTable


def edited_reqs(
    table: RequestTable, rows: Int32Array, ends: Int32Array, samples: NDArray[np.bool_]
) -> tuple[EditedReq, ...] | None:
    """Return the sampling requests with edited logits; None if there are none.

    rows, ends, samples: [B], of the batch; ends are the positions of the tokens to sample.
    """
    indices = np.flatnonzero(table.edits_logits[rows] & samples).tolist()
    if not indices:
        return None
    edited = []
    for index in indices:
        row, position = int(rows[index]), int(ends[index])
        req = table.req_at(row)
        assert req.logit_states is not None, "a row with edited logits has states: this is a bug"
        first_since_admission = position == table.prefill_end[row]
        history = table.tokens[row, :position].copy() if first_since_admission else None
        edited.append(EditedReq(index, position, req.prompt_len, history, req.logit_states))
    return tuple(edited)


def logprobs_request(
    table: RequestTable,
    rows: Int32Array,
    start: Int32Array,
    ends: Int32Array,
    samples: NDArray[np.bool_],
) -> LogprobsRequest | None:
    """Return the log-probabilities that a batch with these columns reports; None if none."""
    indices = np.flatnonzero(table.has_logprobs[rows]).tolist()
    if not indices:
        return None
    sampled: Int32Array = np.full(len(rows), -1, dtype=np.int32)
    prompt: Int32Array = sampled.copy()
    targets: list[Int32Array] = [sampled[:0]]
    for index in indices:
        row, first, end = int(rows[index]), int(start[index]), int(ends[index])
        req = table.req_at(row)
        if req.sampling.prompt_logprobs is not None and first < req.prompt_len - 1:
            prompt[index] = req.sampling.prompt_logprobs
            following: Int32Array = np.full(end - first, -1, dtype=np.int32)
            in_prompt = table.tokens[row, first + 1 : min(end + 1, req.prompt_len)]
            following[: len(in_prompt)] = in_prompt
            targets.append(following)
        if samples[index] and req.sampling.logprobs is not None:
            sampled[index] = req.sampling.logprobs
    return LogprobsRequest(sampled, prompt, np.concatenate(targets))
