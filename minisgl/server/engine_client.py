"""The API server's view of the engine: every open generation, and the queues to the workers.

One asyncio task calls `receive` for each message that arrives; handlers call the rest. All in one
event loop, so nothing here locks.
"""

import array
import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from minisgl.core import (
    Cancelled,
    DeadlineExceeded,
    FinishReason,
    InvalidRequest,
    Overloaded,
    PromptTooLong,
    RequestError,
)
from minisgl.message import (
    AbortReq,
    AddReq,
    DecodeIds,
    FlushCache,
    StepText,
    TextUpdate,
    TokenizeRequest,
    TokenizeResult,
    TokenText,
    ToScheduler,
    ToTokenizer,
)
from minisgl.server.config import Limits
from minisgl.server.convert import Prompt, TokenArray
from minisgl.server.errors import EngineFailure, RanTooLong
from minisgl.server.metrics import ChoiceProgress, Metrics
from minisgl.utils import log_event

logger = logging.getLogger(__name__)

# What a scheduler may refuse a request for, by the name that its Finished carries.
_REFUSALS: Mapping[str, type[RequestError]] = MappingProxyType(
    {c.__name__: c for c in (DeadlineExceeded, InvalidRequest, Overloaded, PromptTooLong)}
)
# Of questions with a tokenizer; it cannot be told that nobody waits for an answer any more.
_ENOUGH_BYTES = 2**16


@dataclass(eq=False, slots=True)
class ChoiceDelta:
    """What some clients want beside text, as far as it has not been taken yet."""

    reasoning: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenText] = field(default_factory=list)
    prompt_logprobs: list[TokenText] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Choice(ChoiceProgress):
    """One answer of a call: a uid in the engine, and the text that the client has not received."""

    uid: int
    index: int
    _changed: asyncio.Event
    text: list[str] = field(default_factory=list)
    extras: ChoiceDelta | None = None
    submitted: bool = False

    def take(self) -> tuple[str, ChoiceDelta | None]:
        """The text that has arrived since the last call, and what came beside it; None: nothing."""
        text, extras = "".join(self.text), self.extras
        self.text.clear()
        self.extras = None
        return text, extras

    def apply(self, update: TextUpdate) -> None:
        self.opened = True
        if update.text:
            self.text.append(update.text)
        self.latest = update
        if update.reasoning or update.token_ids or update.logprobs or update.prompt_logprobs:
            extras = self.extras = self.extras or ChoiceDelta()
            extras.reasoning += update.reasoning
            extras.token_ids += update.token_ids
            extras.logprobs += update.logprobs
            extras.prompt_logprobs += update.prompt_logprobs
        self.finish = update.finish
        if update.finish in (FinishReason.ERROR, FinishReason.ABORT):
            kind = _REFUSALS.get(update.error_kind, EngineFailure)
            self.error = kind(update.error or "the engine ended this request")
        self._changed.set()


@dataclass(eq=False, slots=True)
class Generation:
    """All choices of one HTTP call. `changed` is set when any of them has news.

    beat: woken without news, so that an idle stream shows that it lives.
    question: the last one that a tokenizer has been asked for it.
    echoes, prompt_ids: per prompt, when the answer repeats them.
    """

    request_id: str
    started_s: float = field(default_factory=time.monotonic)
    choices: list[Choice] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    beat: bool = False
    question: asyncio.Future[TokenizeResult] | None = None
    echoes: list[str] = field(default_factory=list)
    prompt_ids: list[list[int]] = field(default_factory=list)

    def echo(self, choice: Choice) -> str:
        """The prompt that the text of this choice begins with; "" without echo."""
        index = choice.index * len(self.echoes) // len(self.choices)
        return self.echoes[index] if self.echoes else ""

    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    def opened(self) -> bool:
        return any(choice.opened for choice in self.choices)

    @property
    def error(self) -> RequestError | None:
        """The first error of any choice."""
        return next((c.error for c in self.choices if c.error is not None), None)

    def summary(self) -> dict[str, object]:
        """For the log: never any text of prompt or answer."""
        ends = {choice.finish or FinishReason.ABORT for choice in self.choices}
        first_s = min((choice.first_s for choice in self.choices if choice.first_s), default=None)
        return {
            "request_id": self.request_id,
            "choices": len(self.choices),
            "finish": ",".join(sorted(ends)),
            "longest_prompt_tokens": max(choice.latest.prompt_tokens for choice in self.choices),
            "cached_tokens": max(choice.latest.cached_tokens for choice in self.choices),
            "completion_tokens": sum(choice.latest.completion_tokens for choice in self.choices),
            "ttft_s": None if first_s is None else round(first_s - self.started_s, 3),
            "duration_s": round(time.monotonic() - self.started_s, 3),
        }

    def fail(self, error: RequestError) -> bool:
        """End all choices that have not ended, and what waits for a tokenizer. False: all had."""
        unfinished = [choice for choice in self.choices if choice.finish is None]
        end = FinishReason.ABORT if isinstance(error, Cancelled) else FinishReason.ERROR
        for choice in unfinished:
            choice.finish, choice.error = end, error
        self.changed.set()
        if self.question is not None and not self.question.done():
            self.question.set_exception(error)
        return bool(unfinished)

    async def news(self) -> None:
        """Wait until some choice has changed since the last call."""
        await self.changed.wait()
        self.changed.clear()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`. Raises the first error of any choice."""
        while not is_so() and self.error is None:
            await self.news()
        if self.error is not None:
            raise self.error


class EngineClient:
    """Sends work, receives results, and forgets a request wholly when it ends.

    I1  `_choices` holds exactly the choices that the engine has not ended and nobody has closed.
    I2  a uid that was submitted and is closed before its end is aborted, once.
    I3  `queued` counts the choices in `_choices` without any output yet, `queued_tokens` the prompt
        tokens that they have submitted (siblings share theirs); both stay bounded.
    """

    def __init__(
        self,
        to_tokenizers: Sequence[Callable[[ToTokenizer], int]],
        to_scheduler: Callable[[ToScheduler], object],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self._to_tokenizers = to_tokenizers
        self._to_scheduler = to_scheduler
        self.limits = limits
        self.metrics = metrics
        self._uids = itertools.count(1)
        self._choices: dict[int, Choice] = {}
        self._questions: dict[asyncio.Future[TokenizeResult], TokenizeRequest] = {}
        self._asked: dict[int, tuple[int, int, asyncio.Future[TokenizeResult]]] = {}
        self._outstanding = [0] * len(to_tokenizers)  # bytes
        self._generations: set[Generation] = set()
        self.queued = self.queued_tokens = 0

    @property
    def open_generations(self) -> int:
        return len(self._generations)

    @property
    def open_choices(self) -> int:
        return len(self._choices)

    @property
    def awaits_engine(self) -> bool:
        """Some choice has reached the scheduler; others wait for a tokenizer."""
        return any(choice.submitted for choice in self._choices.values())

    def open(self, num_choices: int, request_id: str = "") -> Generation:
        """Admit a call. Raises Overloaded at once when the queue is full, InvalidRequest for a call
        that no queue here can take."""
        most = self.limits.max_queued_reqs
        if num_choices > most:
            text = f"one call may ask for {most} answers at most, not {num_choices}"
            raise InvalidRequest(text, limit="max_queued_reqs")
        if self.queued + num_choices > most:
            raise Overloaded("the request queue is full; try again later", limit="max_queued_reqs")
        generation = Generation(request_id)
        for index in range(num_choices):
            choice = Choice(
                next(self._uids), index, generation.changed, started_s=generation.started_s
            )
            generation.choices.append(choice)
            self._choices[choice.uid] = choice
        self.queued += num_choices
        self._generations.add(generation)
        return generation

    def close(self, generation: Generation) -> None:
        """Forget a call; whatever of it still runs is aborted. Idempotent."""
        if generation not in self._generations:
            return
        self._generations.remove(generation)
        if any(choice.submitted for choice in generation.choices):
            log_event(logger, logging.INFO, "call ended", **generation.summary())
        self._abort(generation)

    def end(self, generation: Generation, error: RequestError) -> bool:
        """End an open call with this error; its handler then closes it. False: it had ended."""
        ended = generation.fail(error)
        self._abort(generation)
        return ended

    def end_by_id(self, request_id: str, error: RequestError) -> int:
        """End the calls of exactly this request id; how many ran."""
        return sum([self.end(g, error) for g in self._generations if g.request_id == request_id])

    def end_overdue(self, now_s: float) -> None:
        """End what has run for longer than max_total_s, or waited longer than max_wait_s."""
        limits = self.limits
        for generation in self._generations:
            age_s = now_s - generation.started_s
            if age_s > limits.max_total_s:
                most = f"the answer took longer than {limits.max_total_s:g} s"
                if self.end(generation, RanTooLong(most)):
                    self.metrics.on_limit("max_total_s")
            elif age_s > limits.max_wait_s and not generation.opened():
                most = f"the request waited longer than {limits.max_wait_s:g} s"
                self.end(generation, DeadlineExceeded(most, limit="max_wait_s"))

    def require_room(self, tokens: int) -> None:
        """Raises Overloaded when a call of so many prompt tokens is too much beside those queued;
        alone it never is."""
        if self.queued_tokens and self.queued_tokens + tokens > self.limits.max_queued_tokens:
            most = "too many prompt tokens are queued; try again later"
            raise Overloaded(most, limit="max_queued_tokens")

    def submit(self, choice: Choice, request: AddReq, tokens: int) -> None:
        """Hand one choice to the scheduler, unless it has been ended; its prompt adds `tokens`."""
        if choice.uid not in self._choices:
            return
        choice.submitted = True
        choice.prompt_share = tokens
        self.queued_tokens += tokens
        self._to_scheduler(request)

    def flush_cache(self) -> None:
        """Make the engine forget its cached prefixes, in order with all requests."""
        self._to_scheduler(FlushCache())

    async def tokenize(self, prompt: Prompt, param: str, call: Generation) -> TokenArray:
        """Ids of the prompt given as `param`. Raises what the worker found wrong."""
        if isinstance(prompt, array.array):
            return prompt
        return array.array("i", (await self._ask(prompt, call, param)).token_ids)

    async def decode(self, token_ids: TokenArray, skip_special: bool, call: Generation) -> str:
        question = DecodeIds(token_ids=token_ids.tobytes(), skip_special=skip_special)
        return (await self._ask(question, call, None)).text

    async def _ask(
        self, what: TokenizeRequest, call: Generation, param: str | None
    ) -> TokenizeResult:
        """Ask a worker; an end of the call ends the wait. Raises what it found."""
        waiting: asyncio.Future[TokenizeResult] = asyncio.get_running_loop().create_future()
        call.question = waiting
        self._questions[waiting] = what
        waiting.add_done_callback(lambda given_up: self._questions.pop(given_up, None))
        self._hand_out()
        answer = await waiting
        if answer.error is not None:
            if answer.internal:
                self.metrics.on_failed()
            kind = EngineFailure if answer.internal else InvalidRequest
            raise kind(answer.error, param=param, limit=answer.limit)
        return answer

    def _hand_out(self) -> None:
        """Give workers enough to do; what waits here is forgotten with the call that asks it."""
        while self._questions and min(self._outstanding) < _ENOUGH_BYTES:
            worker = self._outstanding.index(min(self._outstanding))
            waiting = next(iter(self._questions))
            what, uid = self._questions.pop(waiting), next(self._uids)
            size = self._to_tokenizers[worker](msgspec.structs.replace(what, uid=uid))
            self._outstanding[worker] += size
            self._asked[uid] = worker, size, waiting

    def receive_answer(self, message: TokenizeResult) -> int:
        """A worker has answered; nobody may be waiting any more. Which worker it was."""
        worker, size, answer = self._asked.pop(message.uid)
        self._outstanding[worker] -= size
        self._hand_out()
        if not answer.done():
            answer.set_result(message)
        return worker

    def receive_text(self, message: StepText) -> None:
        """Give the texts of one step to their choices; what comes after the end of one is late."""
        now_s = time.monotonic()
        for update in message.updates:
            if update.stopped:
                self._to_scheduler(AbortReq(uid=update.uid, reason=FinishReason.STOP))
            choice = self._choices.get(update.uid)
            if choice is None or choice.error is not None:
                continue
            self.metrics.on_update(choice, update, now_s)
            if not choice.opened:
                self._leave_queue(choice)
            choice.apply(update)
            if choice.finish is not None:
                self.metrics.on_end(choice)
                del self._choices[update.uid]

    def beat(self) -> None:
        """Wake every call; a stream that has nothing to say sends a sign of life."""
        for generation in self._generations:
            generation.beat = True
            generation.changed.set()

    def fail_all(self, error: RequestError) -> None:
        """End every open call with this error; their handlers then close them."""
        for generation in self._generations:
            generation.fail(error)

    def _leave_queue(self, choice: Choice) -> None:
        self.queued -= 1
        self.queued_tokens -= choice.prompt_share

    def _abort(self, generation: Generation) -> None:
        for choice in generation.choices:
            if self._choices.pop(choice.uid, None) is None:
                continue  # it has finished
            if not choice.opened:
                self._leave_queue(choice)
            if choice.submitted:
                self.metrics.on_end(choice)
                self._to_scheduler(AbortReq(uid=choice.uid))
