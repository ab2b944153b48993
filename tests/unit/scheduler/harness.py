"""A scheduler with the fake engine, driven message by message."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import numpy as np

from minisgl.core import FinishReason, SchedulerConfig
from minisgl.core.batch import Batch, DraftLengths
from minisgl.kvcache.kinds import NewKind
from minisgl.message.messages import AbortReq, AddReq, PromptImage
from minisgl.scheduler import LocalInbox, Scheduler
from minisgl.scheduler import scheduler as scheduler_module
from minisgl.scheduler.plan import plan
from minisgl.scheduler.view import StepPlan, View
from tests.unit.scheduler.fake_engine import EOS, VOCAB, FakeEngine
from tests.unit.scheduler.integrity import check_held, check_scheduler, windows_of
from tests.unit.scheduler.scripted import SCRIPTED, ScriptedParams


@dataclass
class Answer:
    """The outputs of one request, as a client would see them.

    predicted, accepted  tokens of its prediction, and those that drafts from it gave to the output.
    """

    tokens: list[int] = field(default_factory=list)
    predicted: int = 0
    accepted: int = 0
    opened: int = 0
    cached_tokens: int = 0
    finishes: list[FinishReason] = field(default_factory=list)
    error: str | None = None


class Harness:
    """One scheduler, its engine and all its outputs so far."""

    def __init__(
        self,
        engine: FakeEngine,
        config: SchedulerConfig | None = None,
        eos_token_ids: tuple[int, ...] = (EOS,),
        drafts: DraftLengths | None = None,
        checks: Callable[[View], StepPlan] = plan,
        kinds: tuple[NewKind, ...] = (),
    ) -> None:
        """checks: called in place of `plan`. kinds: further kinds of memory."""
        self.checks = checks
        self.engine = engine
        self.inbox, self.outbox = LocalInbox(), deque()
        self.scheduler = Scheduler(
            engine,
            config or SchedulerConfig(target_step_ms=None),
            vocab_size=VOCAB,
            eos_token_ids=eos_token_ids,
            inbox=self.inbox,
            send=self.outbox.append,
            extensions=replace(
                SCRIPTED,
                draft_lengths=drafts and (lambda rows: drafts),
                cache_kinds=kinds,
            ),
        )
        self.answers: dict[int, Answer] = {}
        self.next_uid = 1

    def add(
        self,
        prompt: list[int],
        cache_salt: str = "",
        client: str = "",
        call: int = 0,
        count: int = 1,
        priority: int = 0,
        prediction: list[int] | None = None,
        stable: int = 0,
        first: int = 0,
        session: str = "",
        images: tuple[PromptImage, ...] = (),
        **sampling: object,
    ) -> int:
        """Queue `count` requests with consecutive uids and return the first uid.

        The calls have different values in each sampling column, which check_batches compares.
        """
        uid = self.next_uid
        self.next_uid += count
        own = {"temperature": 1 / uid, "top_k": uid, "top_p": 1 / uid, "min_p": 1 / uid}
        params = ScriptedParams(**({"max_tokens": 8} | own | sampling))  # type: ignore[arg-type]
        ids = np.array(prompt, dtype="<i4").tobytes()
        self.inbox.messages.append(
            AddReq(
                uid=uid,
                token_ids=ids,
                sampling=params,
                cache_salt=cache_salt,
                session=session,
                count=count,
                client=client,
                call=call,
                priority=priority,
                prediction=np.array(prediction or [], dtype="<i4").tobytes(),
                prefixes=(stable, first),
                images=images,
            )
        )
        self.answers |= {each: Answer() for each in range(uid, uid + count)}
        return uid

    def abort(self, uid: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """Queue an abort."""
        self.inbox.messages.append(AbortReq(uid=uid, reason=reason))

    def step(self) -> None:
        """Run one iteration and check every invariant after it."""
        in_flight = [step.batch for step in self.scheduler._in_flight]
        read = {place: page for batch in in_flight for place, page in self._pages(batch, False)}
        launched = len(self.engine.batches)
        with patch.object(scheduler_module, "plan", self.checks):
            self.scheduler.iterate()
        for batch in self.engine.batches[launched:]:
            for place, page in self._pages(batch, written_only=True):
                others = {where for where, other in read.items() if other == page} - {place}
                assert not others, f"page {page} is written while a step in flight has it"
        check_scheduler(self.scheduler)
        if self.engine.batches:
            check_held(self.scheduler, self.engine.batches[-1])
        self.collect()

    def _pages(self, batch: Batch, written_only: bool) -> list[tuple[tuple[int, int], int]]:
        """The window pages of a batch by row and column, or those that it writes."""
        size, found = self.engine.page_size, []
        steps = [*zip(batch.rows, batch.start, batch.lengths, strict=True)]
        for windows in windows_of(self.scheduler.memory):
            for row, start, length in steps:
                first = start // size - (0 if written_only else windows.span)
                for column in range(max(int(first), 0), -(-int(start + length) // size)):
                    found.append(((int(row), column), int(windows.table.entries[row, column])))
        return found

    def collect(self) -> None:
        """Take the outputs in the order in which a detokenizer reads them."""
        while self.outbox:
            output = self.outbox.popleft()
            for done in output.prefill_done:
                self.answers[done.uid].opened += 1
                self.answers[done.uid].cached_tokens = done.cached_tokens
                self.answers[done.uid].predicted = done.prediction_tokens
            for uid, token in zip(output.uids, output.token_ids, strict=True):
                answer = self.answers[uid]
                assert answer.opened == 1, "a token before the PrefillDone message"
                assert not answer.finishes, "a token after the Finished message"
                answer.tokens.append(token)
            for uid, count in output.predicted:
                assert not self.answers[uid].finishes, "a count after the Finished message"
                self.answers[uid].accepted += count
                assert self.answers[uid].accepted <= len(self.answers[uid].tokens)
            for finished in output.finished:
                self.answers[finished.uid].finishes.append(finished.reason)
                self.answers[finished.uid].error = finished.error

    def run(self, max_steps: int = 10_000) -> None:
        """Iterate until idle."""
        for _ in range(max_steps):
            self.step()
            if self.scheduler.idle and not self.inbox.messages:
                return
        raise AssertionError("not idle after many steps")
