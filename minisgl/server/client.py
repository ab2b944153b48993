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
from types import MappingProxyType
from typing import Protocol, TypeAlias

from minisgl.core import (
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
    Decoded,
    StepText,
    TextUpdate,
    Tokenized,
    TokenText,
    ToScheduler,
    ToTokenizer,
)
from minisgl.server.errors import EngineFailure

__all__ = ["Choice", "EngineClient", "Extras", "Generation", "TokenArray"]

logger = logging.getLogger(__name__)

TokenArray: TypeAlias = "array.array[int]"  # int32 ids; quoted: not subscriptable in 3.11


# What a scheduler may refuse a request for, by the name that its Finished carries.
_REFUSALS: Mapping[str, type[RequestError]] = MappingProxyType(
    {c.__name__: c for c in (DeadlineExceeded, InvalidRequest, Overloaded, PromptTooLong)}
)


class Extras:
    """What some clients want beside text, as far as it has not been taken yet."""

    __slots__ = ("logprobs", "prompt_logprobs", "reasoning", "token_ids")

    def __init__(self) -> None:
        self.reasoning = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenText] = []
        self.prompt_logprobs: list[TokenText] = []

    def add(self, update: TextUpdate) -> None:
        self.reasoning += update.reasoning
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs


class _Outbox(Protocol):
    def send(self, message: ToScheduler, /) -> None: ...


class _TokenizerOutbox(Protocol):
    def send(self, message: ToTokenizer, /) -> None: ...


class Choice:
    """One answer under way: a uid in the engine, and the text that the client has not got yet."""

    __slots__ = (
        "_generation",
        "cached_tokens",
        "completion_tokens",
        "error",
        "extras",
        "finish",
        "index",
        "opened",
        "prompt_tokens",
        "reasoning_tokens",
        "submitted",
        "text",
        "uid",
    )

    def __init__(self, uid: int, index: int, generation: "Generation") -> None:
        self.uid = uid
        self.index = index
        self.text: list[str] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self.extras: Extras | None = None
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.opened = False
        self.submitted = False
        self._generation = generation

    def take_text(self) -> str:
        """What has arrived since the last call."""
        text = "".join(self.text)
        self.text.clear()
        return text

    def take_extras(self) -> Extras | None:
        """The same for what came beside the text; None: nothing."""
        extras, self.extras = self.extras, None
        return extras

    def apply(self, update: TextUpdate) -> None:
        self.opened = True
        if update.text:
            self.text.append(update.text)
        self.prompt_tokens = update.prompt_tokens
        self.cached_tokens = update.cached_tokens
        self.completion_tokens = update.completion_tokens
        if update.reasoning or update.token_ids or update.logprobs or update.prompt_logprobs:
            self.extras = self.extras or Extras()
            self.extras.add(update)
            self.reasoning_tokens = update.reasoning_tokens
        self.finish = update.finish
        if update.finish in (FinishReason.ERROR, FinishReason.ABORT):
            kind = _REFUSALS.get(update.error_kind, EngineFailure)
            self.error = kind(update.error or "the engine ended this request")
        self._generation.changed.set()

    def fail(self, error: RequestError) -> None:
        if self.finish is None:
            self.finish = FinishReason.ERROR
            self.error = error
            self._generation.changed.set()


class Generation:
    """All choices of one HTTP call. `changed` is set when any of them has news.

    beat: woken without news, so that an idle stream shows that it lives.
    echoes, prompt_ids: per prompt, when the answer repeats them.
    """

    __slots__ = ("beat", "changed", "choices", "echoes", "prompt_ids", "request_id", "started_s")

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.started_s = time.monotonic()
        self.choices: list[Choice] = []
        self.changed = asyncio.Event()
        self.beat = False
        self.echoes: list[str] = []
        self.prompt_ids: list[list[int]] = []

    def echo(self, choice: Choice) -> str:
        """The prompt that the text of this choice begins with; "" without echo."""
        return (
            self.echoes[choice.index * len(self.echoes) // len(self.choices)] if self.echoes else ""
        )

    @property
    def finished(self) -> bool:
        return all(choice.finish is not None for choice in self.choices)

    @property
    def opened(self) -> bool:
        return any(choice.opened for choice in self.choices)

    @property
    def error(self) -> RequestError | None:
        """The first error of any choice."""
        return next((c.error for c in self.choices if c.error is not None), None)

    def summary(self) -> str:
        """One line for the log: never any text of prompt or answer."""
        ends = {choice.finish or FinishReason.ABORT for choice in self.choices}
        prompt_tokens = max(choice.prompt_tokens for choice in self.choices)
        completion_tokens = sum(choice.completion_tokens for choice in self.choices)
        return (
            f"request_id={self.request_id} choices={len(self.choices)} "
            f"finish={','.join(sorted(ends))} longest_prompt_tokens={prompt_tokens} "
            f"completion_tokens={completion_tokens} "
            f"duration_s={time.monotonic() - self.started_s:.3f}"
        )

    async def news(self) -> None:
        """Wait until some choice has changed since the last call."""
        await self.changed.wait()
        self.changed.clear()


class EngineClient:
    """Sends work, receives results, and forgets a request wholly when it ends.

    I1  `_choices` holds exactly the choices that the engine has not ended and nobody has closed.
    I2  a uid that was submitted and is closed before its end is aborted, once.
    I3  `queued` counts the choices in `_choices` without any output yet, and stays bounded.
    """

    def __init__(
        self,
        tokenizers: Sequence[_TokenizerOutbox],
        scheduler: _Outbox,
        max_queued_reqs: int,
    ) -> None:
        self._tokenizers = tokenizers
        self._scheduler = scheduler
        self._max_queued_reqs = max_queued_reqs
        self._uids = itertools.count(1)
        self._choices: dict[int, Choice] = {}
        self._answers: dict[int, asyncio.Future[Tokenized | Decoded]] = {}
        self._worker_of: dict[int, int] = {}
        self._outstanding = [0] * len(tokenizers)
        self._generations: set[Generation] = set()
        self.queued = 0

    @property
    def open_generations(self) -> int:
        return len(self._generations)

    @property
    def open_choices(self) -> int:
        return len(self._choices)

    @property
    def pending_answers(self) -> int:
        return len(self._worker_of)

    def open(self, num_choices: int, request_id: str = "") -> Generation:
        """Admit a call. Raises Overloaded at once when the queue is full."""
        if self.queued + num_choices > self._max_queued_reqs:
            raise Overloaded("the request queue is full; try again later")
        generation = Generation(request_id)
        for index in range(num_choices):
            choice = Choice(next(self._uids), index, generation)
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
        logger.info("call ended %s", generation.summary())
        for choice in generation.choices:
            if self._forget(choice) and choice.submitted:
                self._scheduler.send(AbortReq(uid=choice.uid))

    def submit(self, choice: Choice, request: AddReq) -> None:
        """Hand one choice to the scheduler, unless it has been ended meanwhile."""
        if choice.uid in self._choices:
            choice.submitted = True
            self._scheduler.send(request)

    async def tokenize(self, message: Callable[[int], ToTokenizer], param: str) -> TokenArray:
        """Ids of the text or chat given as `param`. Raises what the worker found wrong."""
        answer = await self._ask(message)
        assert isinstance(answer, Tokenized), "a tokenizer answered with text; this is a bug"
        if answer.error is not None:
            kind = EngineFailure if answer.internal else InvalidRequest
            raise kind(answer.error, param=param)
        return array.array("i", answer.token_ids)

    async def decode(self, message: Callable[[int], ToTokenizer]) -> str:
        """The text of ids."""
        answer = await self._ask(message)
        if isinstance(answer, Tokenized):
            raise EngineFailure(answer.error or "the prompt could not be decoded")
        return answer.text

    async def _ask(self, message: Callable[[int], ToTokenizer]) -> Tokenized | Decoded:
        uid = next(self._uids)
        worker = self._outstanding.index(min(self._outstanding))
        self._outstanding[worker] += 1
        self._worker_of[uid] = worker
        answer: asyncio.Future[Tokenized | Decoded] = asyncio.get_running_loop().create_future()
        self._answers[uid] = answer
        self._tokenizers[worker].send(message(uid))
        try:
            return await answer
        finally:
            del self._answers[uid]

    def receive_answer(self, message: Tokenized | Decoded) -> None:
        """A worker has answered; nobody may be waiting any more."""
        worker = self._worker_of.pop(message.uid, None)
        if worker is not None:
            self._outstanding[worker] -= 1
        answer = self._answers.get(message.uid)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def receive_text(self, message: StepText) -> None:
        """Give the texts of one step to their choices; updates of forgotten uids are late."""
        for update in message.updates:
            if update.stopped:
                self._scheduler.send(AbortReq(uid=update.uid, reason=FinishReason.STOP))
            choice = self._choices.get(update.uid)
            if choice is None:
                continue
            if not choice.opened:
                self.queued -= 1
            choice.apply(update)
            if choice.finish is not None:
                del self._choices[update.uid]

    def beat(self) -> None:
        """Wake every call; a stream that has nothing to say sends a sign of life."""
        for generation in self._generations:
            generation.beat = True
            generation.changed.set()

    def fail_all(self, error: RequestError) -> None:
        """End every open call with this error; their handlers then close them."""
        for choice in list(self._choices.values()):
            choice.fail(error)
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(error)

    def _forget(self, choice: Choice) -> bool:
        """True when the choice had not finished."""
        if self._choices.pop(choice.uid, None) is None:
            return False
        if not choice.opened:
            self.queued -= 1
        return True
