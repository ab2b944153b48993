"""`LocalEngine`: runs calls in the caller's thread, with the methods of the server's EngineView."""

import itertools
from collections.abc import Iterator
from functools import cached_property, lru_cache

import msgspec

from minisgl.core import FinishReason, InvalidRequest, ModelFacts
from minisgl.images import ImageDecoder
from minisgl.llm.results import Scores
from minisgl.llm.workers import LocalWorker, RankWorkers
from minisgl.message.messages import (
    AbortReq,
    CompileGrammar,
    GrammarResult,
    StepOutput,
)
from minisgl.request.call import Call, Caller, Submission
from minisgl.request.choice import Choice
from minisgl.request.convert import CallRequest
from minisgl.request.question import Answer, Question
from minisgl.structured.library import load_tokenizer
from minisgl.structured.source import GrammarCompiler
from minisgl.tokenizer.detokenizer import Detokenizer
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tokenizer.vocab import Vocabulary
from minisgl.tokenizer.worker import tokenize
from minisgl.tool_calls.detect import detect_format
from minisgl.tool_calls.formats import ToolCallParsers, ToolGrammarWriter

_CACHED_GRAMMARS = 64


class LocalGrammars:
    """Compiles the grammars of one LLM, and keeps the results.

    Its cache refers to it, so it does not know the engine: a dropped LLM ends its ranks at once.
    """

    def __init__(self, folder: str, vocabulary: Vocabulary) -> None:
        self._folder = folder
        self._vocabulary = vocabulary
        self.compile = lru_cache(_CACHED_GRAMMARS)(self._new_grammar)

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        """The compiler. The first constraint loads it, because that takes up to a second."""
        # The compilation does not depend on the EOS ids, so this uses one id of no meaning.
        tokenizer = load_tokenizer(self._folder, (0,))
        write_tools = ToolGrammarWriter(self._vocabulary)
        return GrammarCompiler(tokenizer, write_tools, self._vocabulary.think_ids)

    def _new_grammar(self, request: CompileGrammar) -> GrammarResult:
        try:
            checked = self._compiler.check(request)
        except InvalidRequest as error:
            return GrammarResult(uid=0, error=error.message, limit=error.limit)
        # With 0.0, the scheduler compiles the grammar when the request arrives.
        return GrammarResult(uid=0, grammar=msgspec.structs.replace(checked, compile_s=0.0))


class LocalEngine:
    """The tokenizer, the compiler of grammars, the detokenizer and the scheduler of one LLM.

    worker: the scheduler. scores: of the calls that asked for log-probabilities, by uid. They have
    the ids of the tokens, which the updates of the detokenizer lack.
    """

    def __init__(
        self,
        worker: LocalWorker | RankWorkers,
        folder: str,
        tokenizer: TextTokenizer,
        decoder: ImageDecoder | None,
    ) -> None:
        """decoder: None if the model has no images."""
        self.worker = worker
        self.scores: dict[int, Scores] = {}
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._uids = itertools.count(1)
        self._running: dict[int, Call] = {}
        self._grammars = LocalGrammars(folder, tokenizer.vocabulary)
        self._open_parser = ToolCallParsers(tokenizer.vocabulary)
        self._detokenizer = Detokenizer(tokenizer.vocabulary, self._open_parser)

    def has_calls(self) -> bool:
        """True if some submitted call has not ended."""
        return bool(self._running)

    @cached_property
    def facts(self) -> ModelFacts:
        """The facts of the model, with those that only a chat needs."""
        return msgspec.structs.replace(
            self.worker.facts,
            tool_format=detect_format(self._tokenizer, "auto"),
            template_variables=self._tokenizer.template_variables,
        )

    def open(self, request: CallRequest) -> Call:
        """Open a call."""
        uids = [next(self._uids) for _ in range(request.num_choices)]
        return Call(request, Caller(client="", priority=request.priority or 0), uids)

    def ask(self, question: Question) -> Answer:
        """Answer a question. Raises the error of the answer."""
        message = question.message
        answer: Answer
        if isinstance(message, CompileGrammar):
            answer = self._grammars.compile(message)
        else:
            answer = tokenize(self._tokenizer, message, self._decoder)
        if (failure := question.failure(answer)) is not None:
            raise failure
        return answer

    def submit(self, call: Call, submission: Submission) -> None:
        """Send the choices of one prompt to the scheduler."""
        add = submission.add
        for text in submission.texts:
            self._running[text.uid] = call
            self._detokenizer.handle(text)
        if add.sampling.logprobs is not None or add.sampling.prompt_logprobs is not None:
            self.scores |= {text.uid: Scores([], []) for text in submission.texts}
        self.worker.send(add)

    def receive(self) -> Iterator[tuple[Call, Choice]]:
        """Run one step, and yield each choice with new output."""
        for output in self.worker.step():
            step = self._detokenizer.handle(self._without_scores(output))
            for update in step.updates if step is not None else ():
                call = self._running[update.uid]
                if update.stopped:
                    self.worker.send(AbortReq(uid=update.uid, reason=FinishReason.STOP))
                choice = call.apply(update)
                if choice.finish is not None:
                    del self._running[update.uid]
                yield call, choice

    def abort_all(self) -> None:
        """Abort the running calls, and return when every request has ended.

        After an interrupt the calls still run, and the next call of this method aborts them.
        """
        self.worker.abort_and_wait(self._running)
        self._running.clear()
        self.scores.clear()
        # The outputs of aborted requests are not read. A new detokenizer holds none of their state.
        self._detokenizer = Detokenizer(self._tokenizer.vocabulary, self._open_parser)

    def _without_scores(self, output: StepOutput) -> StepOutput:
        """Keep the log-probabilities of a step, and return its other outputs.

        A stop string ends a text before the scheduler knows it. The log-probabilities of the steps
        that ranks have computed meanwhile are dropped.
        """
        if not output.logprobs and not output.prompt_logprobs:
            return output
        for found in output.prompt_logprobs:
            self.scores[found.uid].prompt.append(found)
        for found in output.logprobs:
            if found.uid in self.scores:
                self.scores[found.uid].output.append(found)
        return msgspec.structs.replace(output, logprobs=[], prompt_logprobs=[])
