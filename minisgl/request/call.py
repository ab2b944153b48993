"""The state of one HTTP call while the engine generates: Generation, Choice and ChoiceDelta.

A `Generation` is one HTTP call. It has n choices per prompt; each `Choice` is one answer, which the
engine computes as one request with its own uid. The engine client applies the updates of the
detokenizer to the choices, and the response takes the new output:

    TextUpdate --apply()--> Choice --take()--> (text, ChoiceDelta or None) --> client
                              |
                              +-- sets Generation.changed, which wakes the handler

Most choices have only text. Reasoning, token ids and log-probabilities are in a `ChoiceDelta`.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from minisgl import core
from minisgl.core import EngineFailure, FinishReason
from minisgl.message.messages import (
    GrammarResult,
    TextUpdate,
    TokenizeResult,
    TokenLogprob,
    ToolCallDelta,
)
from minisgl.settings.config import DEFAULT_CLIENT

# The errors with which a scheduler refuses a request, by the `error_kind` of Finished.
_REFUSALS: Mapping[str, type[core.RequestError]] = {
    kind.__name__: kind
    for kind in (
        core.DeadlineExceeded,
        core.GrammarFailed,
        core.InvalidRequest,
        core.Overloaded,
        core.PromptTooLong,
    )
}


def priority_class(priority: int) -> str:
    """The class of a priority, a label with three values: below, at and above the default 0."""
    return "high" if priority < 0 else "low" if priority else "default"


@dataclass(eq=False, slots=True)
class ChoiceDelta:
    """New output of a choice besides its text, since the last `Choice.take`.

    reasoning: the pieces of the reasoning, like `Choice.text`.
    prompt_ids: the ids of the prompt in the first delta, if the answer contains them.
    """

    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Choice:
    """One answer of a call, with the output that the response has not taken yet.

    uid           id of the request in the engine.
    index         position of the choice in the call: prompt index * n + number within its prompt.
    started_s     time of admission, like first_s and last_s in seconds of CLOCK_MONOTONIC.
    client        the name of the key that sent the call.
    priority      the priority of the call.
    text, delta   the output that has not been taken. `take` joins the pieces of the text. With echo
                  the first piece is the prompt.
    latest        the last update, whose token counts are totals.
    finish        finish reason; None while the engine works on the choice.
    error         the error that ended the choice before its answer was complete.
    prefill_done  the engine has sent its first update. The choice was queued until then.
    has_calls     the answer has a tool call.
    offset        characters that the response adds to the engine's text offsets. If another choice
                  reports the log-probabilities of an echoed prompt, it is the length of the prompt.
    submitted     the choice has been sent to the scheduler.
    prompt_share  prompt tokens that count for this choice: all for the first choice of a prompt, 0
                  for the others.
    queued_share  as prompt_share, with the tokens of the prediction.
    first_s, last_s
                  arrival of its first and its latest token; 0 before the first token.
    """

    uid: int
    index: int
    _changed: asyncio.Event
    started_s: float
    client: str
    priority: int = 0
    text: list[str] = field(default_factory=list)
    delta: ChoiceDelta | None = None
    latest: TextUpdate = field(default_factory=lambda: TextUpdate(uid=0))
    finish: FinishReason | None = None
    error: core.RequestError | None = None
    prefill_done: bool = False
    has_calls: bool = False
    offset: int = 0
    submitted: bool = False
    prompt_share: int = 0
    queued_share: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    def take(self) -> tuple[str, ChoiceDelta | None]:
        """Return the text since the last call, and the other new output or None."""
        text, delta = "".join(self.text), self.delta
        self.text.clear()
        self.delta = None
        return text, delta

    def apply(self, update: TextUpdate) -> None:
        """Add an update of the detokenizer."""
        self.prefill_done = True
        if update.text:
            self.text.append(update.text)
        self.latest = update
        if (
            update.reasoning
            or update.calls
            or update.token_ids
            or update.logprobs
            or update.prompt_logprobs
        ):
            delta = self.delta = self.delta or ChoiceDelta()
            if update.reasoning:
                delta.reasoning.append(update.reasoning)
            delta.calls += update.calls
            self.has_calls = self.has_calls or bool(update.calls)
            delta.token_ids += update.token_ids
            delta.logprobs += update.logprobs
            delta.prompt_logprobs += update.prompt_logprobs
        self.finish = update.finish
        if update.finish in (FinishReason.ERROR, FinishReason.ABORT):
            kind = _REFUSALS.get(update.error_kind, EngineFailure)
            self.error = kind(update.error or "the engine ended this request")
        self._changed.set()


@dataclass(eq=False, slots=True)
class Generation:
    """One HTTP call with all its choices.

    client         the name of the key that sent the call.
    priority       calls with a lower number are served first.
    tokens         tokens that the call asks for, as counted for max_call_tokens.
    changed        set when any choice has changed; the handler waits for it.
    keep_alive     the call was woken without new output, so that an idle stream sends a comment.
    asked          the result of another process that the call waits for.
    log            further fields of the call's log line.
    """

    request_id: str
    client: str = DEFAULT_CLIENT
    priority: int = 0
    tokens: int = 0
    started_s: float = field(default_factory=time.monotonic)
    choices: list[Choice] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    keep_alive: bool = False
    asked: asyncio.Future[TokenizeResult] | asyncio.Future[GrammarResult] | None = None
    log: dict[str, object] = field(default_factory=dict)

    def finished(self) -> bool:
        """True if all choices have ended."""
        return all(choice.finish is not None for choice in self.choices)

    def has_output(self) -> bool:
        """True if the engine has sent the first update of at least one choice."""
        return any(choice.prefill_done for choice in self.choices)

    @property
    def error(self) -> core.RequestError | None:
        """The error of the first choice that has one."""
        return next((c.error for c in self.choices if c.error is not None), None)

    def fail(self, error: core.RequestError) -> bool:
        """End every choice that has not ended, and the wait for another process, with this error.

        Returns False if all choices had ended.
        """
        unfinished = [choice for choice in self.choices if choice.finish is None]
        finish = FinishReason.ABORT if isinstance(error, core.Cancelled) else FinishReason.ERROR
        for choice in unfinished:
            choice.finish, choice.error = finish, error
        self.changed.set()
        if self.asked is not None and not self.asked.done():
            self.asked.set_exception(error)
        return bool(unfinished)

    async def wait_for_change(self) -> None:
        """Wait until some choice has changed since the last call."""
        await self.changed.wait()
        self.changed.clear()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Raises the first error of any choice."""
        while not condition() and self.error is None:
            await self.wait_for_change()
        if self.error is not None:
            raise self.error

    def summary(self) -> dict[str, object]:
        """Fields of the log line at the end of a call. They hold no prompt and no answer."""
        finishes = {choice.finish or FinishReason.ABORT for choice in self.choices}
        first_s = min((choice.first_s for choice in self.choices if choice.first_s), default=None)
        return {
            "choices": len(self.choices),
            "finish": ",".join(sorted(finishes)),
            "longest_prompt_tokens": max(choice.latest.prompt_tokens for choice in self.choices),
            "cached_tokens": max(choice.latest.cached_tokens for choice in self.choices),
            "completion_tokens": sum(choice.latest.completion_tokens for choice in self.choices),
            "ttft_s": None if first_s is None else round(first_s - self.started_s, 3),
        }
