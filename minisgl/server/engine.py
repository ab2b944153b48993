"""The API server's view of the engine: all open calls, and the queues to the worker processes.

The life of one call:

    open()       the call is admitted, with one queued Choice per answer    or Overloaded
    tokenize()   text or chat -> token ids, by a tokenizer process          or InvalidRequest
    ask()        another request to a tokenizer process                     or InvalidRequest
    compile()    a grammar, by the process for grammars                     or InvalidRequest
    submit()     StartText of each choice to the detokenizer, then one AddReq to the scheduler
    receive_text()
                 per step: a TextUpdate of each choice that has new text. The first update of a
                 choice takes it out of the queue. The last update ends it in the engine.
    close()      the response is complete or the client is gone: abort the running choices

`end()` and `fail_all()` end a call from outside: they set the error of its choices and wake its
handler, which responds and closes the call.

The receiver task of the process calls the receive methods. Handlers call the other methods. All
of them run in one event loop, so this module needs no lock.
"""

import array
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from minisgl.core import (
    DeadlineExceeded,
    EngineFailure,
    FinishReason,
    InvalidRequest,
    Overloaded,
    RequestError,
)
from minisgl.message import messages
from minisgl.request.call import Choice, Generation, priority_class
from minisgl.request.constraints import ConstraintRequest
from minisgl.request.convert import Prompt, TokenArray
from minisgl.server.errors import RanTooLong
from minisgl.server.observe.metrics import Metrics
from minisgl.server.pools.grammars import GrammarPool
from minisgl.server.pools.tokenizers import TokenizerPool
from minisgl.settings.config import DEFAULT_CLIENT, Limits


class Tokenized(NamedTuple):
    """The ids of a prompt. thinks, prefixes: of a chat, as in TokenizeResult."""

    token_ids: TokenArray
    thinks: bool = False
    prefixes: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class ClientLoad:
    """The open calls of one client, or the queue of one client and one class of priorities.

    choices  choices that the engine has not ended; in a queue those without output.
    tokens   tokens of the open calls, as counted for max_call_tokens. In a queue: tokens of the
             prompts and predictions of the choices that have been submitted. If several choices
             share a prompt, it counts once.
    """

    choices: int = 0
    tokens: int = 0


class EngineClient:
    """Sends requests to the engine, receives their output, and forgets each when it ends.

    I1  `_choices` holds the choices of open calls that the engine has not ended, and no others.
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
        self._choices: dict[int, Choice] = {}
        self._generations: set[Generation] = set()

    @property
    def open_generations(self) -> int:
        return len(self._generations)

    @property
    def open_choices(self) -> dict[str, int]:
        """The number of open choices of each client."""
        return {client: load.choices for client, load in self.loads.items()}

    @property
    def awaits_engine(self) -> bool:
        """True while an open choice has been submitted to the scheduler and has not ended.

        A choice that waits for a tokenizer does not count.
        """
        return any(choice.submitted for choice in self._choices.values())

    def open(
        self,
        num_choices: int,
        request_id: str = "",
        client: str = DEFAULT_CLIENT,
        priority: int = 0,
        log: dict[str, object] | None = None,
    ) -> Generation:
        """Admit a call with this number of choices. Its handler must close the generation.

        client: the name of the key. log: receives the fields of Generation.summary when a call that
        reached the engine is closed. The uids of the choices are consecutive.

        Raises Overloaded when the queue of the client is full, or the client has too many open
        requests. Raises InvalidRequest when even an empty queue could not hold the call.
        """
        load, queue = self.loads[client], self.queues[client, priority_class(priority)]
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
        generation = Generation(request_id, client, priority, log={} if log is None else log)
        for index in range(num_choices):
            choice = Choice(
                next(self._uids), index, generation.changed, generation.started_s, client, priority
            )
            generation.choices.append(choice)
            self._choices[choice.uid] = choice
        queue.choices += num_choices
        load.choices += num_choices
        self._generations.add(generation)
        return generation

    def close(self, generation: Generation) -> None:
        """Forget a call, and abort its choices that still run. May be called twice."""
        if generation not in self._generations:
            return
        self._generations.remove(generation)
        self.loads[generation.client].tokens -= generation.tokens
        if any(choice.submitted for choice in generation.choices):
            generation.log.update(generation.summary())
        self._abort(generation)

    def end(self, generation: Generation, error: RequestError) -> bool:
        """End an open call with this error; its handler then closes it.

        Returns False if the call had ended already.
        """
        was_running = generation.fail(error)
        self._abort(generation)
        return was_running

    def end_by_id(self, request_id: str, error: RequestError) -> int:
        """End the open calls with exactly this request id. Returns the number of these calls."""
        return sum([self.end(g, error) for g in self._generations if g.request_id == request_id])

    def end_overdue(self, now_s: float) -> None:
        """End calls older than max_total_s, and calls without output older than max_wait_s."""
        limits = self.limits
        for generation in self._generations:
            age_s = now_s - generation.started_s
            if age_s > limits.max_total_s:
                error = RanTooLong(f"the answer took longer than {limits.max_total_s:g} s")
                if self.end(generation, error):
                    self.metrics.on_limit("max_total_s")
            elif age_s > limits.max_wait_s and not generation.has_output():
                message = f"the request waited longer than {limits.max_wait_s:g} s"
                self.end(generation, DeadlineExceeded(message, limit="max_wait_s"))

    def fail_all(self, error: RequestError) -> None:
        """End every open call with this error; their handlers then close them."""
        for generation in self._generations:
            generation.fail(error)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the submitted prompts and predictions that have no output."""
        return sum(queue.tokens for queue in self.queues.values())

    def require_room(self, call: Generation, prompt_tokens: int, tokens: int) -> None:
        """Raise Overloaded when a call and the other open calls of its client exceed a token limit.

        A limit never refuses a call if the client has no other open tokens that count for this
        limit. One large call on an idle server is therefore admitted.

        prompt_tokens: tokens of the call's prompts and of its prediction. tokens: as counted for
        max_call_tokens, and those of the prediction.
        """
        load = self.loads[call.client]
        queued = self.queues[call.client, priority_class(call.priority)].tokens
        if queued and queued + prompt_tokens > self.limits.max_queued_tokens:
            reason = "too many prompt tokens are queued; try again later"
            raise Overloaded(reason, limit="max_queued_tokens")
        maximum = self.limits.max_key_tokens
        if maximum is not None and load.tokens and load.tokens + tokens > maximum:
            reason = "the open requests of this client have too many tokens; try again later"
            raise Overloaded(reason, limit="max_key_tokens")
        call.tokens = tokens
        load.tokens += tokens

    def submit(
        self, choices: Sequence[Choice], request: messages.AddReq, text: messages.TextOptions
    ) -> None:
        """Send the choices of one prompt to the engine, unless their call has ended.

        request: one message for all choices. The scheduler gives them consecutive uids, from
        request.uid on. The first choice reports the log-probabilities of the prompt.
        """
        if choices[0].uid not in self._choices:
            return
        first = choices[0]
        first.prompt_share = len(request.token_ids) // 4
        first.queued_share = first.prompt_share + len(request.prediction) // 4
        self.queues[first.client, priority_class(first.priority)].tokens += first.queued_share
        for choice in choices:
            options = text
            if choice is first and request.sampling.prompt_logprobs is not None:
                options = msgspec.structs.replace(text, prompt_ids=request.token_ids)
            choice.submitted = True
            self._to_detokenizer(messages.StartText(uid=choice.uid, options=options))
        self._to_scheduler(request)

    def flush_cache(self) -> None:
        """Ask the scheduler to clear the prefix cache.

        The scheduler reads this message after the requests that were submitted before. It does not
        wait for their end.
        """
        self._to_scheduler(messages.FlushCache())

    async def tokenize(self, prompt: Prompt, param: str, call: Generation) -> Tokenized:
        """The token ids of a prompt. Raises InvalidRequest for `param` if tokenizing fails."""
        if isinstance(prompt, array.array):
            return Tokenized(prompt)
        result = await self.ask(prompt, call, param)
        ids = array.array("i", result.token_ids)
        return Tokenized(ids, result.thinks, result.prefixes)

    async def ask(
        self, request: messages.TokenizeRequest, call: Generation, param: str | None = None
    ) -> messages.TokenizeResult:
        """Send a request to a tokenizer and wait for the result.

        Raises the error of the result. If an error ends the call before the result arrives, raises
        the error of the call.
        """
        call.asked = asked = self._tokenizers.submit(request, call.client)
        result = await asked
        if result.error is not None:
            raise self._failure(result, result.error, param)
        return result

    async def compile(
        self, constraint: ConstraintRequest, call: Generation
    ) -> messages.GrammarResult:
        """Let the process for grammars check and compile a constraint. Raises as `ask`."""
        call.asked = asked = self._grammars.submit(constraint.message, call.client)
        result = await asked
        if (error := result.error) is not None:
            param = constraint.param
            error = f"{param}{'' if error.startswith('/') else ': '}{error}"
            raise self._failure(result, error, param)
        self.metrics.count("structured_requests_total", 1, constraint.message.kind)
        return result

    def _failure(
        self,
        result: messages.TokenizeResult | messages.GrammarResult,
        error: str,
        param: str | None,
    ) -> RequestError:
        if not result.internal:
            return InvalidRequest(error, param=param, limit=result.limit)
        self.metrics.count("requests_total", 1, "error")
        return EngineFailure(error, param=param)

    def receive_tokenize_result(self, message: messages.TokenizeResult) -> int:
        """Pass a result to its call, if that is still open. Returns the index of the tokenizer."""
        return self._tokenizers.receive(message)

    def receive_grammar_result(self, message: messages.GrammarResult) -> None:
        """Pass a result to its call, if that is still open."""
        self._grammars.receive(message)

    def receive_text(self, message: messages.StepText) -> None:
        """Apply the updates of one step. Updates of choices that have ended are dropped."""
        now_s = time.monotonic()
        for update in message.updates:
            if update.stopped:
                self._to_scheduler(messages.AbortReq(uid=update.uid, reason=FinishReason.STOP))
            choice = self._choices.get(update.uid)
            if choice is None or choice.error is not None:
                continue
            self.metrics.on_update(choice, update, now_s)
            if not choice.prefill_done:
                self._leave_queue(choice)
            choice.apply(update)
            if choice.finish is not None:
                self.metrics.on_end(choice)
                del self._choices[update.uid]
                self.loads[choice.client].choices -= 1

    def send_keep_alives(self) -> None:
        """Wake every call, so that each stream without new output sends a comment."""
        for generation in self._generations:
            generation.keep_alive = True
            generation.changed.set()

    def _leave_queue(self, choice: Choice) -> None:
        queue = self.queues[choice.client, priority_class(choice.priority)]
        queue.choices -= 1
        queue.tokens -= choice.queued_share

    def _abort(self, generation: Generation) -> None:
        for choice in generation.choices:
            if self._choices.pop(choice.uid, None) is None:
                continue  # The engine has ended it.
            self.loads[choice.client].choices -= 1
            if not choice.prefill_done:
                self._leave_queue(choice)
            if choice.submitted:
                self.metrics.on_end(choice)
                self._to_scheduler(messages.AbortReq(uid=choice.uid))
