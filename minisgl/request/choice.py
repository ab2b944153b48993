"""`Choice`: one answer of a call, with its unread output."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from minisgl import core
from minisgl.core import EngineFailure, FinishReason
from minisgl.message.messages import TextUpdate
from minisgl.message.text import TokenLogprob, ToolCallDelta

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


@dataclass(eq=False, slots=True)
class Details:
    """Output of a choice besides its text.

    reasoning: the pieces of the reasoning, like `Choice.text`.
    prompt_ids: the ids of the prompt in the first details, if the answer contains them. The choices
    of a prompt share them.
    """

    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_ids: Sequence[int] = ()


class Output(NamedTuple):
    """The output of a choice that was unread. details: None if there is only text."""

    text: str
    details: Details | None = None


@dataclass(eq=False, slots=True)
class Choice:
    """One answer of a call, with its unread output.

    uid           id of the request in the engine.
    index         position of the choice in the call: prompt index * n + number within its prompt.
    text, details the unread output. With echo the first piece of the text is the prompt.
    unread        number of updates, and of errors, since the last `Call.take`.
    latest        the last update, whose token counts are totals.
    finish        finish reason; None while the engine works on the choice.
    error         the error that ended the choice before its answer was complete.
    prefill_done  the engine has sent its first update. The choice was queued until then.
    has_calls     the answer has a tool call.
    offset        characters that the response adds to the engine's text offsets. If another choice
                  reports the log-probabilities of an echoed prompt, it is the length of the prompt.
    prompt_share  prompt tokens that count for this choice: all for the first choice of a prompt, 0
                  for the others.
    queued_share  as prompt_share, with the tokens of the prediction.
    breakpoints   as in Breakpoints.places.
    first_s, last_s
                  arrival of its first and its latest token, in seconds of CLOCK_MONOTONIC; 0 before
                  the first token.
    """

    uid: int
    index: int
    text: list[str] = field(default_factory=list)
    details: Details | None = None
    unread: int = 0
    latest: TextUpdate = field(default_factory=lambda: TextUpdate(uid=0))
    finish: FinishReason | None = None
    error: core.RequestError | None = None
    prefill_done: bool = False
    has_calls: bool = False
    offset: int = 0
    prompt_share: int = 0
    queued_share: int = 0
    breakpoints: tuple[int, int] = (0, 0)
    first_s: float = 0.0
    last_s: float = 0.0

    def add(self, update: TextUpdate) -> None:
        """Add an update of the detokenizer to the unread output."""
        self.prefill_done = True
        self.unread += 1
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
            details = self.details = self.details or Details()
            if update.reasoning:
                details.reasoning.append(update.reasoning)
            details.calls += update.calls
            self.has_calls = self.has_calls or bool(update.calls)
            details.token_ids += update.token_ids
            details.logprobs += update.logprobs
            details.prompt_logprobs += update.prompt_logprobs
        self.finish = update.finish
        if update.finish in (FinishReason.ERROR, FinishReason.ABORT):
            kind = _REFUSALS.get(update.error_kind, EngineFailure)
            self.error = kind(update.error or "the engine ended this request")


def whole_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the parts of each call: its beginning, with all of its arguments."""
    calls = []
    for _, group in itertools.groupby(parts, lambda part: part.index):
        begin, *pieces = group
        arguments = "".join([begin.arguments, *(piece.arguments for piece in pieces)])
        calls.append(msgspec.structs.replace(begin, arguments=arguments))
    return calls
