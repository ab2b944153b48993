"""`Call`: one call, from its validated request to its last token. It does no I/O.

The server drives a call by queues, and `LLM` by function calls:

    questions()  the messages to the tokenizer and to the compiler of grammars
    fit()        answers -> one Submission for each prompt          or InvalidRequest
    apply()      a TextUpdate of one choice: its new output is unread, which wakes the reader
    output()     wait for unread output
    take()       the unread output of one choice -> Output
    fail()       end the choices that still run with an error
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from minisgl import core
from minisgl.core import FinishReason, ModelFacts
from minisgl.message import messages
from minisgl.message.text import PROMPT_TAIL_TOKENS
from minisgl.request.choice import Choice, Details, Output
from minisgl.request.convert import CallRequest
from minisgl.request.fit import FittedPrompt, fit_prompts
from minisgl.request.images import without_files
from minisgl.request.question import Answer, Question
from minisgl.settings.config import DEFAULT_CLIENT, Limits


def priority_class(priority: int) -> str:
    """The class of a priority, a label with three values: below, at and above the default 0."""
    return "high" if priority < 0 else "low" if priority else "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a call.

    client    the name of the API key; "" in an offline run.
    priority  calls with a lower number are served first.
    session   the key of the session of the call, as in AddReq.
    log       receives the fields of `Call.summary` when a call that reached the engine is closed.
    """

    request_id: str = ""
    client: str = DEFAULT_CLIENT
    priority: int = 0
    session: str = ""
    log: dict[str, object] = field(default_factory=dict)


class Submission(NamedTuple):
    """The messages that start the choices of one prompt.

    add: to the scheduler, which gives the choices consecutive uids, from add.uid on. The first
    choice reports the log-probabilities of the prompt.
    texts: to the detokenizer, one for each choice, before `add`.
    """

    add: messages.AddReq
    texts: tuple[messages.StartText, ...]


class Fitted(NamedTuple):
    """The submissions of a call, and the numbers of tokens that the limits bound.

    queued_tokens: of the prompts and of the prediction. tokens: the count of max_call_tokens, plus
    the tokens of the prediction.
    """

    submissions: list[Submission]
    queued_tokens: int
    tokens: int


class Call:
    """One call with all its choices.

    request    None: the call asks a tokenizer, and generates nothing.
    choices    one answer each, with consecutive uids.
    submitted  its choices have been sent to the engine.
    tokens     the counted tokens, while they count for the limits of the client.
    image_bytes
               size of its images: the files, then the pixels that the scheduler keeps.
    asked      the answer of another process that the call waits for.
    """

    def __init__(self, request: CallRequest | None, caller: Caller, uids: Sequence[int]) -> None:
        self.request = request
        self.caller = caller
        self.choices = [Choice(uid, index) for index, uid in enumerate(uids)]
        self.started_s = time.monotonic()
        self.submitted = False
        self.tokens = 0
        self.image_bytes = 0
        self.asked: (
            asyncio.Future[messages.TokenizeResult] | asyncio.Future[messages.GrammarResult] | None
        ) = None
        self._unread = 0
        self._is_beating = False
        self._readable = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def uid(self) -> int:
        """The uid of the first choice, which is also the number of the call."""
        return self.choices[0].uid

    def questions(self) -> list[Question]:
        """The questions whose answers `fit` needs, in this order.

        The grammar comes first, then the prompts that are not token ids, the prediction, and the
        texts of the prompts that the answer repeats.
        """
        request = self._request
        asked = []
        if request.grammar is not None:
            asked.append(Question(request.grammar.message, request.grammar.param))
        asked += request.prompt_questions()
        if isinstance(request.prediction, messages.TokenizeText):
            asked.append(Question(request.prediction, "prediction"))
        for _, prompt in request.prompts if request.echo else ():
            if not isinstance(prompt, msgspec.Struct):
                skip = request.text.skip_special_tokens
                ids = messages.DecodeIds(token_ids=prompt.tobytes(), skip_special=skip)
                asked.append(Question(ids))
        return asked

    def fit(self, answers: Sequence[Answer], facts: ModelFacts, limits: Limits) -> Fitted:
        """Fit the call into the context and into max_call_tokens.

        answers: of `questions`, in the same order. Raises the errors of `fit_prompts`.
        """
        request, rest = self._request, iter(answers)
        compiled = next(rest) if request.grammar is not None else None
        assert compiled is None or isinstance(compiled, messages.GrammarResult), "this is a bug"
        prompts, tokens = fit_prompts(request, rest, compiled, facts, limits.max_call_tokens)
        prediction = b""
        queued_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if isinstance(request.prediction, messages.TokenizeText):
            expected = next(rest)
            assert isinstance(expected, messages.TokenizeResult), "this is a bug"
            prediction = expected.token_ids
        elif request.prediction is not None:
            prediction = request.prediction.tobytes()
        # An answer has room for so many tokens after the prompt.
        prediction = prediction[: 4 * max(facts.max_seq_len - queued_tokens, 0)]
        self._begin_answers(prompts, rest, facts.page_size)
        submissions = [
            self._submission(prompt, index * request.n, prediction)
            for index, prompt in enumerate(prompts)
        ]
        kept = without_files(request.prompts)
        self.request = msgspec.structs.replace(request, prompts=kept)
        predicted = len(prediction) // 4
        return Fitted(submissions, queued_tokens + predicted, tokens + predicted)

    def apply(self, update: messages.TextUpdate) -> Choice:
        """Add an update of the detokenizer, and wake the reader. Returns its choice."""
        choice = self.choices[update.uid - self.uid]
        choice.add(update)
        self._unread += 1
        self._readable.set()
        if choice.finish is not None:
            self._check_end()
        return choice

    def fail(self, error: core.RequestError) -> bool:
        """End every choice that has not ended, and the wait for another process, with this error.

        Returns False if all choices had ended.
        """
        unfinished = [choice for choice in self.choices if choice.finish is None]
        finish = FinishReason.ABORT if isinstance(error, core.Cancelled) else FinishReason.ERROR
        for choice in unfinished:
            choice.finish, choice.error = finish, error
            choice.unread += 1
        self._unread += len(unfinished)
        self._readable.set()
        self._check_end()
        if self.asked is not None and not self.asked.done():
            self.asked.set_exception(error)
        return bool(unfinished)

    def beat(self) -> None:
        """Wake the reader without output, so that an idle stream sends a comment."""
        self._is_beating = True
        self._readable.set()

    async def output(self) -> bool:
        """Return while unread output exists. Returns True once after `beat`."""
        await self._readable.wait()
        if was_beating := self._is_beating:
            self._is_beating = False
            self._settle()
        return was_beating

    async def begun(self) -> None:
        """Return when a choice has output. Raises the first error of any choice."""
        while not self.has_output and self.error is None:
            await self.output()
        if self.error is not None:
            raise self.error

    async def ended(self) -> None:
        """Return when all choices have ended. Raises the first error of any choice."""
        await self._ended.wait()
        if self.error is not None:
            raise self.error

    def take(self, choice: int) -> Output:
        """Return the unread output of the choice with this index."""
        chosen = self.choices[choice]
        output = Output("".join(chosen.text), chosen.details)
        chosen.text.clear()
        chosen.details = None
        self._unread -= chosen.unread
        chosen.unread = 0
        self._settle()
        return output

    @property
    def has_output(self) -> bool:
        """True if the engine has sent the first update of at least one choice."""
        return any(choice.prefill_done for choice in self.choices)

    @property
    def error(self) -> core.RequestError | None:
        """The error of the first choice that has one."""
        return next((c.error for c in self.choices if c.error is not None), None)

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

    @property
    def _request(self) -> CallRequest:
        assert self.request is not None, "the call must have a request; this is a bug"
        return self.request

    def _check_end(self) -> None:
        if all(choice.finish is not None for choice in self.choices) or self.error is not None:
            self._ended.set()

    def _settle(self) -> None:
        """Let the reader wait if everything is read."""
        if not self._unread and not self._is_beating:
            self._readable.clear()

    def _begin_answers(
        self, prompts: Sequence[FittedPrompt], rest: Iterator[Answer], page_size: int
    ) -> None:
        """Begin each answer with the parts of the prompt that it repeats."""
        request = self._request
        echoes: list[str] = []
        for _, prompt in request.prompts if request.echo else ():
            if isinstance(prompt, messages.TokenizeText):
                echoes.append(prompt.text)
                continue
            decoded = next(rest)
            assert isinstance(decoded, messages.TokenizeResult), "this is a bug"
            echoes.append(decoded.text)
        for choice in self.choices:
            index, number = divmod(choice.index, request.n)
            choice.breakpoints = request.breakpoints.places(prompts[index].prefixes, page_size)
            if request.text.token_ids:
                choice.details = Details(prompt_ids=prompts[index].token_ids)
            if request.echo:
                choice.text.append(echoes[index])
                if request.sampling.prompt_logprobs is not None and number:
                    choice.offset = len(echoes[index])

    def _submission(self, prompt: FittedPrompt, index: int, prediction: bytes) -> Submission:
        """index: of the first choice of this prompt."""
        request, uid = self._request, self.uid + index
        ids = prompt.token_ids
        add = messages.AddReq(
            uid=uid,
            token_ids=prompt.padded or ids.tobytes(),
            sampling=prompt.sampling,
            prediction=prediction,
            cache_salt=request.cache_salt,
            session=self.caller.session,
            count=request.n,
            client=self.caller.client,
            call=self.uid if self.caller.client else 0,
            priority=self.caller.priority,
            prefixes=prompt.prefixes,
            images=prompt.images,
        )
        tail = ids[-PROMPT_TAIL_TOKENS:].tolist()
        options = msgspec.structs.replace(request.text, prompt_tail=tail)
        first = options
        if prompt.sampling.prompt_logprobs is not None:
            first = msgspec.structs.replace(options, prompt_ids=ids.tobytes())
        texts = [messages.StartText(uid=uid, options=first)]
        texts += [
            messages.StartText(uid=uid + number, options=options) for number in range(1, request.n)
        ]
        return Submission(add, tuple(texts))
