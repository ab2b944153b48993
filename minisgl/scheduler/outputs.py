"""Collects what one iteration has to say."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.core import Batch, FinishReason, Int32Array, RequestError, StepResult
from minisgl.core.batch import HostLogprobs
from minisgl.message.messages import AddReq, Finished, PrefillDone, StepOutput, TokenLogprobs
from minisgl.scheduler.request import Req
from minisgl.scheduler.request_table import RequestTable


class OutputBuilder:
    """One StepOutput in the making: `_next`, whose lists grow until it is taken."""

    def __init__(self) -> None:
        self._next = StepOutput(step_id=0)
        self._held: dict[int, list[TokenLogprobs]] = {}  # of reqs that are not open yet

    def open(self, req: Req) -> None:
        """The first output of `req` is about to be added."""
        req.prefill_done = True
        self._next.prefill_done.append(
            PrefillDone(
                uid=req.uid,
                prompt_tokens=req.prompt_len,
                cached_tokens=req.cached_tokens,
                admitted_s=req.admitted_s,
            )
        )
        self._next.prompt_logprobs.extend(self._held.pop(req.uid, ()))

    def tokens(self, uids: NDArray[np.int64], token_ids: Int32Array) -> None:
        """token_ids[i] is the next token of uids[i]."""
        self._next.uids.extend(uids.tolist())
        self._next.token_ids.extend(token_ids.tolist())

    def logprobs(
        self, batch: Batch, result: StepResult, table: RequestTable, token_rows: Int32Array
    ) -> None:
        """Add the log-probabilities that requests of this step ask for.

        token_rows: rows that got a token in this step.
        """
        wanted, sampled = batch.logprobs, result.logprobs
        if wanted is None:
            return
        got_token = set(token_rows.tolist())
        for index in np.flatnonzero(wanted.sampled >= 0).tolist() if sampled else ():
            row, count = int(batch.rows[index]), int(wanted.sampled[index])
            if row in got_token and sampled is not None:
                self._next.logprobs.append(
                    TokenLogprobs(
                        uid=int(table.uid[row]),
                        position=int(batch.start[index] + batch.lengths[index]),
                        logprobs=[float(sampled.chosen[index])],
                        top_ids=[sampled.top_ids[index, :count].tolist()],
                        top_logprobs=[sampled.top[index, :count].tolist()],
                    )
                )
        for index, prompt in (result.prompt_logprobs or {}).items():
            req = table.reqs[batch.rows[index]]
            if req is not None:
                count = int(wanted.prompt[index])
                self._prompt(req, int(batch.start[index]) + 1, prompt, count)

    def _prompt(self, req: Req, position: int, found: HostLogprobs, count: int) -> None:
        """Add log-probabilities of prompt tokens from `position` on.

        A request that was preempted computes its prompt again, and does not report a token twice.
        """
        first = max(position, req.prompt_reported) - position
        last = min(len(found.chosen), req.prompt_len - position)
        if first >= last:
            return
        req.prompt_reported = position + last
        told = (
            self._next.prompt_logprobs if req.prefill_done else self._held.setdefault(req.uid, [])
        )
        told.append(
            TokenLogprobs(
                uid=req.uid,
                position=position + first,
                logprobs=found.chosen[first:last].tolist(),
                top_ids=found.top_ids[first:last, :count].tolist(),
                top_logprobs=found.top[first:last, :count].tolist(),
            )
        )

    def finish(self, req: Req, reason: FinishReason, error: str | None) -> None:
        """The one terminal message of `req`."""
        if not req.prefill_done:
            self.open(req)
        self._next.finished.append(Finished(uid=req.uid, reason=reason, error=error))

    def refuse(self, message: AddReq, error: RequestError) -> None:
        """The one terminal message of a req that was never accepted."""
        uid, kind = message.uid, type(error).__name__
        opened = PrefillDone(uid=uid, prompt_tokens=len(message.token_ids) // 4, cached_tokens=0)
        finished = Finished(
            uid=uid, reason=FinishReason.ERROR, error=error.message, error_kind=kind
        )
        self._next.prefill_done.append(opened)
        self._next.finished.append(finished)

    def take(self, step_id: int) -> StepOutput | None:
        """Everything collected since the last call; None when there is nothing."""
        found = self._next
        if not (found.prefill_done or found.uids or found.finished):
            return None
        self._next = StepOutput(step_id=0)
        return msgspec.structs.replace(found, step_id=step_id)
