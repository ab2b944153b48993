"""The API server's view of the engine: all open calls, and the queues to the worker processes.

The life of one call:

    open()     the call is admitted, with one queued Choice per answer        or Overloaded
    run()      ask -> Call.fit -> require_room -> submit -> the first output
    receive()  per step: a TextUpdate of each choice that has new text. The first update of a choice
               takes it out of the queue. The last update ends it in the engine.
    close()    the response is complete or the client is gone: abort the running choices

`end()` and `fail_all()` end a call from outside: they set the error of its choices and wake its
handler, which responds and closes the call.

The receiver task of the process calls `receive`. Handlers call the other methods. All of them run
in one event loop, so this module needs no lock.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minisgl.core import (
    DeadlineExceeded,
    EngineFailure,
    FinishReason,
    InvalidRequest,
    ModelFacts,
    Overloaded,
    RequestError,
)
from minisgl.message import messages
from minisgl.request.call import Call, Caller, Fitted, Submission, priority_class
from minisgl.request.choice import Choice
from minisgl.request.convert import CallRequest
from minisgl.request.question import Answer, Question
from minisgl.server.errors import RanTooLong
from minisgl.server.observe.metrics import Metrics
from minisgl.server.pools.grammars import GrammarPool
from minisgl.server.pools.tokenizers import TokenizerPool
from minisgl.settings.config import Limits

EngineOutput: TypeAlias = messages.StepText | messages.TokenizeResult | messages.GrammarResult


@dataclass(slots=True)
class ClientLoad:
    """The open calls of one client, or the queue of one client and one class of priorities.

    choices      choices that the engine has not ended; in a queue those without output.
    tokens       tokens of the open calls, as counted for max_call_tokens. In a queue: tokens of the
                 prompts and predictions of the choices that have been submitted. If several choices
                 share a prompt, it counts once.
    image_bytes  of the open calls. Not counted in a queue.
    """

    choices: int = 0
    tokens: int = 0
    image_bytes: int = 0


class EngineView:
    """Sends calls to the engine, receives their output, and forgets each when it ends.

    I1  `_running` has the call of each choice that the engine has not ended, by the uid of the
        choice. All of these calls are open.
    I2  A submitted choice that is closed before its end is aborted, once.
    I3  `loads` has the sums over the open calls of each client, and `queues` those over the choices
        without output of each client and class of priorities. The limits bound each queue, so a
        full queue does not affect other clients or other classes.
    """

    def __init__(
        self,
        to_tokenizers: Sequence[Callable[[messages.ToTokenizer], int]],
        to_detokenizer: Callable[[messages.ToDetokenizer], object],
        to_scheduler: Callable[[messages.ToScheduler], object],
        to_grammars: Callable[[messages.ToGrammars], object],
        limits: Limits,
        metrics: Metrics,
    ) -> None:
        self.limits = limits
        self.metrics = metrics
        self.loads: defaultdict[str, ClientLoad] = defaultdict(ClientLoad)
        self.queues: defaultdict[tuple[str, str], ClientLoad] = defaultdict(ClientLoad)
        self._tokenizers = TokenizerPool(to_tokenizers)
        self._grammars = GrammarPool(to_grammars)
        self._to_detokenizer = to_detokenizer
        self._to_scheduler = to_scheduler
        self._uids = itertools.count(1)
        self._running: dict[int, Call] = {}
        self._calls: set[Call] = set()
        self._image_bytes = 0  # of all open calls

    @property
    def open_calls(self) -> int:
        return len(self._calls)

    @property
    def open_choices(self) -> dict[str, int]:
        """The number of open choices of each client."""
        return {client: load.choices for client, load in self.loads.items()}

    @property
    def awaits_engine(self) -> bool:
        """True while an open choice has been submitted to the scheduler and has not ended.

        A choice that waits for a tokenizer does not count.
        """
        return any(call.submitted for call in self._running.values())

    @property
    def queued_tokens(self) -> int:
        """Tokens of the submitted prompts and predictions that have no output."""
        return sum(queue.tokens for queue in self.queues.values())

    def open(
        self, caller: Caller, request: CallRequest | None = None, num_choices: int = 1
    ) -> Call:
        """Admit a call with this number of choices. Its handler must close the call.

        request: None for a call that only asks a tokenizer.

        Raises Overloaded when the queue of the client is full, or the client has too many open
        requests. Raises InvalidRequest when even an empty queue could not hold the call.
        """
        load, queue = self.loads[caller.client], self._queue(caller)
        for limit, maximum, current, state in (
            ("max_queued_reqs", self.limits.max_queued_reqs, queue.choices, "waiting"),
            ("max_key_reqs", self.limits.max_key_reqs, load.choices, "open"),
        ):
            if maximum is not None and num_choices > maximum:
                reason = f"one call may ask for at most {maximum} answers, not {num_choices}"
                raise InvalidRequest(reason, limit=limit)
            if maximum is not None and current + num_choices > maximum:
                reason = f"too many requests of this client are {state}; try again later"
                raise Overloaded(reason, limit=limit)
        call = Call(request, caller, [next(self._uids) for _ in range(num_choices)])
        self._running |= dict.fromkeys((choice.uid for choice in call.choices), call)
        queue.choices += num_choices
        load.choices += num_choices
        self._calls.add(call)
        return call

    async def run(self, call: Call, facts: ModelFacts) -> None:
        """Ask, fit and submit an open call, and wait for its first output.

        Raises RequestError when the call ends before its first output; it is then already closed.
        """
        try:
            answers = [await self.ask(call, question) for question in call.questions()]
            fitted = call.fit(answers, facts, self.limits)
            self.require_room(call, fitted)
            for submission in fitted.submissions:
                self.submit(call, submission)
            await call.begun()
        except BaseException:
            self.close(call)
            raise

    async def ask(self, call: Call, question: Question) -> Answer:
        """Send a question to its worker process and wait for the answer.

        Raises the error of the answer. If an error ends the call before the answer arrives, raises
        the error of the call. Raises Overloaded if the images of the open calls are too large.
        """
        message, client = question.message, call.caller.client
        if isinstance(message, messages.TokenizeChat) and message.images:
            self._hold_images(call, sum(len(image.data) for image in message.images))
        answered: asyncio.Future[messages.TokenizeResult] | asyncio.Future[messages.GrammarResult]
        if isinstance(message, messages.CompileGrammar):
            answered = self._grammars.submit(message, client)
        else:
            answered = self._tokenizers.submit(message, client)
        call.asked = answered
        answer: Answer = await answered
        failure = question.failure(answer) or call.error
        if failure is None and isinstance(message, messages.CompileGrammar):
            self.metrics.count("structured_requests_total", 1, message.kind)
        if failure is None:
            if isinstance(answer, messages.TokenizeResult) and answer.images:
                self.metrics.on_images(len(answer.images), answer.decode_s)
                self._hold_images(call, sum(len(image.pixels) for image in answer.images))
            return answer
        if isinstance(failure, EngineFailure):
            self.metrics.count("requests_total", 1, "error")
        raise failure

    def require_room(self, call: Call, fitted: Fitted) -> None:
        """Raise Overloaded when a call and the other open calls of its client exceed a token limit.

        A limit never refuses a call if the client has no other open tokens that count for this
        limit. One large call on an idle server is therefore admitted.
        """
        load, queued = self.loads[call.caller.client], self._queue(call.caller).tokens
        if queued and queued + fitted.queued_tokens > self.limits.max_queued_tokens:
            reason = "too many prompt tokens are queued; try again later"
            raise Overloaded(reason, limit="max_queued_tokens")
        maximum = self.limits.max_key_tokens
        if maximum is not None and load.tokens and load.tokens + fitted.tokens > maximum:
            reason = "the open requests of this client have too many tokens; try again later"
            raise Overloaded(reason, limit="max_key_tokens")
        call.tokens = fitted.tokens
        load.tokens += fitted.tokens

    def submit(self, call: Call, submission: Submission) -> None:
        """Send the choices of one prompt of an open call to the engine."""
        add = submission.add
        first = call.choices[add.uid - call.uid]
        first.prompt_share = len(add.token_ids) // 4
        first.queued_share = first.prompt_share + len(add.prediction) // 4
        self._queue(call.caller).tokens += first.queued_share
        call.submitted = True
        for text in submission.texts:
            self._to_detokenizer(text)
        self._to_scheduler(add)

    def receive(self, message: EngineOutput) -> tuple[str, ...]:
        """Apply a message of a worker process. Returns the names of the workers that it proves
        alive.

        Answers and updates of calls that have ended are dropped.
        """
        if isinstance(message, messages.TokenizeResult):
            return (f"tokenizer-{self._tokenizers.receive(message)}",)
        if isinstance(message, messages.GrammarResult):
            self._grammars.receive(message)
            return ("grammars",)
        now_s = time.monotonic()
        for update in message.updates:
            if update.stopped:
                self._to_scheduler(messages.AbortReq(uid=update.uid, reason=FinishReason.STOP))
            call = self._running.get(update.uid)
            if call is not None and call.choices[update.uid - call.uid].error is None:
                self._apply(call, update, now_s)
        return "scheduler", "detokenizer"

    def flush_cache(self) -> None:
        """Ask the scheduler to clear the prefix cache.

        The scheduler reads this message after the requests that were submitted before. It does not
        wait for their end.
        """
        self._to_scheduler(messages.FlushCache())

    def end_session(self, session: str) -> None:
        """Tell the scheduler that no request of a session follows. session: as in AddReq."""
        self._to_scheduler(messages.EndSession(session=session))

    def close(self, call: Call) -> None:
        """Forget a call, and abort its choices that still run. May be called twice."""
        if call not in self._calls:
            return
        self._calls.remove(call)
        self._count_images(call, 0)
        self.loads[call.caller.client].tokens -= call.tokens
        if call.submitted:
            call.caller.log.update(call.summary())
        self._abort(call)

    def end(self, call: Call, error: RequestError) -> bool:
        """End an open call with this error; its handler then closes it.

        Returns False if the call had ended already.
        """
        was_running = call.fail(error)
        self._abort(call)
        return was_running

    def end_by_id(self, request_id: str, error: RequestError) -> int:
        """End the open calls with exactly this request id. Returns the number of these calls."""
        found = [call for call in self._calls if call.caller.request_id == request_id]
        return sum([self.end(call, error) for call in found])

    def end_overdue(self, now_s: float) -> None:
        """End calls older than max_total_s, and calls without output older than max_wait_s."""
        limits = self.limits
        for call in self._calls:
            age_s = now_s - call.started_s
            if age_s > limits.max_total_s:
                error = RanTooLong(f"the answer took longer than {limits.max_total_s:g} s")
                if self.end(call, error):
                    self.metrics.on_limit("max_total_s")
            elif age_s > limits.max_wait_s and not call.has_output:
                message = f"the request waited longer than {limits.max_wait_s:g} s"
                self.end(call, DeadlineExceeded(message, limit="max_wait_s"))

    def fail_all(self, error: RequestError) -> None:
        """End every open call with this error; their handlers then close them."""
        for call in self._calls:
            call.fail(error)

    def send_keep_alives(self) -> None:
        """Wake every call, so that each stream without new output sends a comment."""
        for call in self._calls:
            call.beat()

    def _apply(self, call: Call, update: messages.TextUpdate, now_s: float) -> None:
        choice = call.choices[update.uid - call.uid]
        self.metrics.on_update(call, choice, update, now_s)
        if not choice.prefill_done:
            self._leave_queue(call, choice)
        call.apply(update)
        if choice.finish is not None:
            self.metrics.on_end(call, choice)
            del self._running[update.uid]
            self.loads[call.caller.client].choices -= 1

    def _hold_images(self, call: Call, size: int) -> None:
        """Count the bytes of the images of an open call, in place of those that it held before.

        A client may hold half of max_image_bytes, so that others find room. Raises Overloaded if
        the open calls of the client, or all of them, hold too many, unless no other holds any.
        """
        most, own = self.limits.max_image_bytes, self.loads[call.caller.client].image_bytes
        for held, share in ((own, most // 2), (self._image_bytes, most)):
            others = held - call.image_bytes
            if others and others + size > share:
                reason = "the images of the open requests are too large; try again later"
                raise Overloaded(reason, limit="max_image_bytes")
        self._count_images(call, size)

    def _count_images(self, call: Call, size: int) -> None:
        added = size - call.image_bytes
        self._image_bytes += added
        self.loads[call.caller.client].image_bytes += added
        call.image_bytes = size

    def _queue(self, caller: Caller) -> ClientLoad:
        return self.queues[caller.client, priority_class(caller.priority)]

    def _leave_queue(self, call: Call, choice: Choice) -> None:
        queue = self._queue(call.caller)
        queue.choices -= 1
        queue.tokens -= choice.queued_share

    def _abort(self, call: Call) -> None:
        for choice in call.choices:
            if self._running.pop(choice.uid, None) is None:
                continue  # The engine has ended it.
            self.loads[call.caller.client].choices -= 1
            if not choice.prefill_done:
                self._leave_queue(call, choice)
            if call.submitted:
                self.metrics.on_end(call, choice)
                self._to_scheduler(messages.AbortReq(uid=choice.uid))
