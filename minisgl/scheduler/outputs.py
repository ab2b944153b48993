"""`OutputBuilder`: collects the output of one iteration for the detokenizer."""

import msgspec

from minisgl.core import FinishReason, MinisglError, RequestError
from minisgl.core.batch import Batch, HostLogprobs, Int32Array, LogprobsRequest, StepResult
from minisgl.message.messages import (
    AddReq,
    Finished,
    PrefillDone,
    SchedulerStats,
    StepOutput,
    TokenLogprobs,
)
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import NewTokens, RequestTable


class OutputBuilder:
    """Collects messages in the next StepOutput until `take` returns it."""

    def __init__(self, table: RequestTable, totals: SchedulerStats) -> None:
        """totals: count the output tokens."""
        self._table, self._totals = table, totals
        self._next = StepOutput(step_id=0)

    def open(self, req: Req) -> None:
        """Add the PrefillDone message of `req`. It precedes the first output of `req`."""
        req.prefill_done = True
        self._next.prefill_done.append(
            PrefillDone(
                uid=req.uid,
                prompt_tokens=req.prompt_len,
                cached_tokens=req.cached_tokens,
                admitted_s=req.admitted_s,
                prediction_tokens=len(req.prediction),
            )
        )
        self._next.prompt_logprobs.extend(req.held_logprobs)

    def tokens(self, new: NewTokens) -> None:
        """Add new tokens. Their rows still belong to the requests."""
        self._totals.output_tokens_total += len(new.rows)
        self._next.uids.extend(self._table.uid[new.rows].tolist())
        self._next.token_ids.extend(new.tokens.tolist())

    def predicted(self, row: int, count: int) -> None:
        """Add the number of new tokens of a request that its prediction contained."""
        if count and len(self._table.req_at(row).prediction):
            self._next.predicted.append((int(self._table.uid[row]), count))

    def logprobs(
        self, wanted: LogprobsRequest, batch: Batch, result: StepResult, token_rows: Int32Array
    ) -> None:
        """Add the log-probabilities of one request of a step.

        token_rows: the row of each token that a request got in this step.
        """
        index, row = wanted.index, batch.rows[wanted.index]
        if wanted.sampled >= 0 and result.logprobs is not None and row in token_rows:
            uid, at = int(self._table.uid[row]), slice(index, index + 1)
            position = int(batch.start[index] + batch.lengths[index])
            message = _token_logprobs(uid, position, result.logprobs, at, wanted.sampled)
            self._next.logprobs.append(message)
        prompt, req = (result.prompt_logprobs or {}).get(index), self._table.reqs[row]
        if prompt is not None and req is not None:
            self._add_prompt(req, int(batch.start[index]) + 1, prompt, wanted.prompt)

    def _add_prompt(self, req: Req, position: int, found: HostLogprobs, count: int) -> None:
        """Add log-probabilities of prompt tokens from `position` on.

        A preempted request computes its prompt again. Its tokens are not reported a second time.
        """
        first = max(position, req.prompt_reported) - position
        last = min(len(found.chosen), req.prompt_len - position)
        if first >= last:
            return
        req.prompt_reported = position + last
        parts = self._next.prompt_logprobs if req.prefill_done else req.held_logprobs
        rows = slice(first, last)
        parts.append(_token_logprobs(req.uid, position + first, found, rows, count))

    def finish(self, req: Req, error: MinisglError | None) -> None:
        """Add the Finished message of `req`. Its end_reason must be set."""
        if not req.prefill_done:
            self.open(req)
        assert req.end_reason is not None, "an end reason must be set; this is a bug"
        self._next.finished.append(_finished(req.uid, req.end_reason, error))

    def refuse(self, uid: int, message: AddReq, error: RequestError) -> None:
        """Add PrefillDone and Finished for the request `uid` of `message`, which was refused."""
        prompt_tokens = len(message.token_ids) // 4
        done = PrefillDone(uid=uid, prompt_tokens=prompt_tokens, cached_tokens=0)
        self._next.prefill_done.append(done)
        self._next.finished.append(_finished(uid, FinishReason.ERROR, error))

    def take(self, step_id: int) -> StepOutput | None:
        """Return the output since the last call; None when there is none."""
        found = self._next
        if not (found.prefill_done or found.uids or found.finished):
            return None
        self._next = StepOutput(step_id=0)
        return msgspec.structs.replace(found, step_id=step_id)


def _finished(uid: int, reason: FinishReason, error: MinisglError | None) -> Finished:
    kind = type(error).__name__ if isinstance(error, RequestError) else ""
    return Finished(
        uid=uid, reason=reason, error=None if error is None else str(error), error_kind=kind
    )


def _token_logprobs(
    uid: int, position: int, found: HostLogprobs, rows: slice, count: int
) -> TokenLogprobs:
    """Return the message for `rows` of `found`, each with its `count` most likely tokens."""
    return TokenLogprobs(
        uid=uid,
        position=position,
        logprobs=found.chosen[rows].tolist(),
        top_ids=found.top_ids[rows, :count].tolist(),
        top_logprobs=found.top[rows, :count].tolist(),
    )
