"""Collects what one iteration has to say, and counts what the scheduler has done."""

import msgspec
import numpy as np
from numpy.typing import NDArray

from minisgl.core import FinishReason, Int32Array, RequestError
from minisgl.message import AddReq, Finished, Opened, StepOutput
from minisgl.scheduler.req import Req

__all__ = ["OutputBuilder", "Totals"]


class Totals(msgspec.Struct):
    """Counts since the start; the names are those of SchedulerStats.

    prompt and cached tokens count once per req, when its first token comes out. prefill tokens
    count what was computed, so resumed reqs count again.
    """

    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    prefill_tokens_total: int = 0
    output_tokens_total: int = 0
    preemptions_total: int = 0
    overlapped_steps_total: int = 0
    nonfinite_rows_total: int = 0


class OutputBuilder:
    """One StepOutput in the making."""

    def __init__(self) -> None:
        self._opened: list[Opened] = []
        self._uids: list[int] = []
        self._token_ids: list[int] = []
        self._finished: list[Finished] = []

    def open(self, req: Req) -> None:
        """The first output of `req` is about to be added."""
        req.opened = True
        self._opened.append(
            Opened(
                uid=req.uid,
                prompt_tokens=req.prompt_len,
                cached_tokens=req.cached_tokens,
                text=req.text,
            )
        )

    def tokens(self, uids: NDArray[np.int64], token_ids: Int32Array) -> None:
        """token_ids[i] is the next token of uids[i]."""
        self._uids.extend(uids.tolist())
        self._token_ids.extend(token_ids.tolist())

    def finish(self, req: Req, reason: FinishReason, error: str | None) -> None:
        """The one terminal message of `req`."""
        if not req.opened:
            self.open(req)
        self._finished.append(Finished(uid=req.uid, reason=reason, error=error))

    def refuse(self, message: AddReq, error: RequestError) -> None:
        """The one terminal message of a req that was never accepted."""
        prompt_tokens = len(message.token_ids) // 4
        self._opened.append(
            Opened(uid=message.uid, prompt_tokens=prompt_tokens, cached_tokens=0, text=message.text)
        )
        self._finished.append(
            Finished(uid=message.uid, reason=FinishReason.ERROR, error=error.message)
        )

    def take(self, step_id: int) -> StepOutput | None:
        """Everything collected since the last call; None when there is nothing."""
        if not (self._opened or self._uids or self._finished):
            return None
        output = StepOutput(
            step_id=step_id,
            opened=self._opened,
            uids=self._uids,
            token_ids=self._token_ids,
            finished=self._finished,
        )
        self._opened, self._uids, self._token_ids, self._finished = [], [], [], []
        return output
