"""`LLM`: text generation without a server, on the scheduler and the engine of the server."""

import weakref
from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from math import inf
from typing import Any, Self

import numpy as np

from minisgl.core import (
    ConfigError,
    EngineConfig,
    InvalidRequest,
    ModelFacts,
    RequestError,
    SamplingParams,
    SchedulerConfig,
    StepCost,
)
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.images import ImageDecoder, image_spec
from minisgl.llm import inputs
from minisgl.llm.local import LocalEngine
from minisgl.llm.requests import LIMITS, RequestMaker, offline_config
from minisgl.llm.results import Completion, Pending, Piece, Scores
from minisgl.llm.workers import LocalWorker, RankWorkers
from minisgl.request.call import Call
from minisgl.request.choice import Choice
from minisgl.request.convert import CallRequest
from minisgl.request.question import Question
from minisgl.settings.config import resized_tokens
from minisgl.settings.model_folder import with_model
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.utils import near_names
from minisgl.utils.startup import Progress


class LLM:
    """Completes prompts and answers chats without a server, for scripts and batch jobs.

        with LLM("Qwen/Qwen3-0.6B", max_seq_len=4096) as llm:
            print(llm.chat([{"role": "user", "content": "Hello!"}], temperature=0.3).text)
            completions = llm.generate(["One prompt", "Another"], SamplingParams(max_tokens=8))
            for piece in llm.stream("Once upon a time"):
                print(piece.text, end="")

    The model runs in this process, or with tp=N in N processes, one for each GPU. The LLM uses the
    scheduler, the engine and the prefix cache of the server. Several LLMs may exist side by side.
    An LLM is not thread-safe and runs one call at a time.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        revision: str | None = None,
        tp: int = 1,
        extensions: Extensions = DEFAULT_EXTENSIONS,
        step_cost: StepCost | None = None,
        **settings: Any,
    ) -> None:
        """Load a model.

        model: a folder, a hub id, or None for the embedded demo model. revision: a branch, tag or
        commit of the hub id.
        tp: number of tensor-parallel ranks, each on a GPU of its own.
        extensions: implementations from outside this package, as in engine.Extensions. They need
        tp=1, because the processes of several ranks get the settings only.
        step_cost: predicts step times. None: the LLM measures its steps. With a fixed cost, equal
        calls give equal steps. It needs tp=1.
        settings: fields of EngineConfig and SchedulerConfig by name, such as num_pages, max_seq_len
        or prefill_budget_tokens. target_step_ms sets a step-time target. By default there is no
        target, because this gives the highest throughput.

        Raises ConfigError for invalid settings and TypeError for an unknown name. With tp > 1,
        every method raises WorkerDied within seconds after a rank has ended. The LLM can then only
        be closed.
        """
        inputs.check_settings(settings)
        names = settings.keys() & {*SchedulerConfig.__struct_fields__}
        policy = {"target_step_ms": None} | {name: settings.pop(name) for name in names}
        # A wrong value raises an error here, before the download of a model.
        engine_config = EngineConfig(model_path="", tp_size=tp, **settings)
        scheduler_config = SchedulerConfig(**policy)
        engine_config = with_model(engine_config, model, revision, weights=True)
        config = offline_config(engine_config, scheduler_config)
        path = engine_config.model_path
        spec = None if engine_config.no_images else image_spec(path)
        self._decoder: ImageDecoder | None = None
        if spec is not None:
            self._decoder = ImageDecoder(
                spec,
                max_pixels=LIMITS.max_image_pixels,
                max_tokens=resized_tokens(engine_config),
                max_request_pixels=LIMITS.max_request_pixels,
                timeout_s=LIMITS.image_timeout_s,
            )
            weakref.finalize(self, self._decoder.close)
        self.tokenizer = TextTokenizer(path, images=spec)
        # The tokenizer is part of reference cycles, so it outlives a dropped LLM.
        weakref.finalize(self, self.tokenizer.close)
        self.worker: LocalWorker | RankWorkers
        if tp == 1:
            self.worker = LocalWorker(engine_config, scheduler_config, extensions, step_cost)
        elif step_cost is not None:
            raise ConfigError(f"step_cost needs tp=1, not {tp}; leave step_cost out")
        elif extensions is DEFAULT_EXTENSIONS:
            self.worker = RankWorkers(config)
        else:
            raise ConfigError(
                f"extensions need tp=1, not {tp}: start the ranks with scheduler.run_scheduler"
            )
        self.facts: ModelFacts = self.worker.facts
        self._engine = LocalEngine(self.worker, path, self.tokenizer, self._decoder)
        self._requests = RequestMaker(config, self._engine)
        self._closed = False
        self._streams = False  # a stream is open

    def default_sampling(self) -> SamplingParams:
        """The sampling parameters that the model's generation config recommends."""
        return SamplingParams(**self.facts.sampling_defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: inputs.Prompt | Sequence[inputs.Prompt],
        sampling: inputs.Sampling = None,
        *,
        n: int = 1,
        stop: inputs.Stop = (),
        progress: bool = True,
        priority: inputs.Priority = 0,
        prediction: inputs.Prediction = None,
        **parameters: Any,
    ) -> Completion | list[Completion]:
        """Complete one prompt, or a list of prompts. A prompt is text, or a sequence of token ids.

        Returns one Completion for one prompt, and a list in the order of the prompts for a list.
        sampling: the parameters for all prompts, a list with one entry for each prompt, or None for
        the model's defaults.
        n: answers to each prompt, each with a seed of its own. If n is above 1, the result is a
        list with the n completions of the first prompt, then those of the second, and so on.
        stop: strings that end a text. progress: show a progress bar if stderr is a terminal.
        priority: prompts with a lower number are computed first; one number, or one for each
        prompt.
        prediction: the expected text or token ids of one prompt, or of each prompt, "" for none.
        With `speculative` a source of drafts. The completions do not depend on it.
        parameters: fields of SamplingParams that replace those of `sampling`, for all prompts.

        Raises InvalidRequest for parameters and prompts of a wrong type or out of range. If the
        engine cannot serve a prompt, for example because it is too long, the Completion of this
        prompt has finish_reason ERROR. The other prompts are not affected.
        """
        single, listed = inputs.as_list(prompts, (int, np.integer), inputs.NOT_A_PROMPT)
        params = self._params(sampling, len(listed), parameters)
        requests = self._requests.prompts(listed, params, n, stop, priority, prediction, not stop)
        return _collect(self._stream(requests), len(listed) * n, single and n == 1, progress)

    def chat(
        self,
        conversations: inputs.Conversation | Sequence[inputs.Conversation],
        sampling: inputs.Sampling = None,
        *,
        n: int = 1,
        stop: inputs.Stop = (),
        progress: bool = True,
        template_options: dict[str, Any] | None = None,
        prediction: inputs.Prediction = None,
        tools: Sequence[dict[str, Any]] = (),
        tool_choice: str | dict[str, Any] | None = None,
        **parameters: Any,
    ) -> Completion | list[Completion]:
        """Answer one conversation, or a list of conversations, with the model's chat template.

        A conversation is a list of messages, and tools is a list of functions, both in the form of
        the server's /v1/chat/completions. A part {"type": "image", "image": X} of a message is a
        path, the bytes of a file, or an image of PIL. template_options: variables for the template.
        tool_choice: as in the server. The answer follows the schema of a tool as there.
        The other parameters, the result and the errors are as in `generate`. `text` has neither
        the reasoning nor the tool calls of the answer.
        """
        single, listed = inputs.as_list(conversations, dict, inputs.NOT_A_CONVERSATION)
        params = self._params(sampling, len(listed), parameters)
        requests = self._requests.chats(
            listed, params, n, stop, prediction, template_options, tools, tool_choice
        )
        return _collect(self._stream(requests), len(listed) * n, single and n == 1, progress)

    def stream(
        self,
        prompts: inputs.Prompt | Sequence[inputs.Prompt],
        sampling: inputs.Sampling = None,
        *,
        n: int = 1,
        stop: inputs.Stop = (),
        **parameters: Any,
    ) -> Iterator[Piece]:
        """Complete prompts as `generate` does, and yield the text in pieces as it is generated.

        Prompts with the highest max_tokens start first, so that no long answer is generated alone
        at the end. If the caller leaves the loop early, the unfinished prompts are aborted.
        """
        _, listed = inputs.as_list(prompts, (int, np.integer), inputs.NOT_A_PROMPT)
        params = self._params(sampling, len(listed), parameters)
        return self._stream(self._requests.prompts(listed, params, n, stop))

    def close(self) -> None:
        """Free the model and the KV pool. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.worker.close()
            self.tokenizer.close()
            if self._decoder is not None:
                self._decoder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stream(self, requests: Sequence[CallRequest]) -> Generator[Piece, None, None]:
        """Run these requests, each with one prompt, and yield their new text."""
        self._check_open()
        engine, pending = self._engine, dict[int, Pending]()
        if self._streams:
            raise InvalidRequest("one call at a time: read the open stream to its end or close it")
        # A second Ctrl-C may have left requests of the last call running.
        engine.abort_all()
        for request in requests:  # A wrong constraint is refused before any request runs.
            if request.grammar is not None:
                engine.ask(Question(request.grammar.message, request.grammar.param))
        most = [request.sampling.max_tokens or inf for request in requests]
        try:
            self._streams = True
            # `stream` explains this order.
            for index in sorted(range(len(requests)), key=lambda i: -most[i]):
                call = engine.open(requests[index])
                answers = [engine.ask(question) for question in call.questions()]
                try:
                    fitted = call.fit(answers, self.facts, LIMITS)
                except RequestError as error:
                    call.fail(error)
                    for choice in call.choices:
                        refused = Pending(index * len(call.choices) + choice.index, ())
                        yield from self._pieces(refused, call, choice)
                    continue
                (submission,) = fitted.submissions
                ids = array("i", submission.add.token_ids)
                for choice in call.choices:
                    position = index * len(call.choices) + choice.index
                    pending[choice.uid] = Pending(position, ids)
                engine.submit(call, submission)
            while engine.has_calls():
                for call, choice in engine.receive():
                    yield from self._pieces(pending[choice.uid], call, choice)
                self._check_open()
        finally:
            self._streams = False
            if not self._closed:
                engine.abort_all()

    def _pieces(self, pending: Pending, call: Call, choice: Choice) -> Iterator[Piece]:
        """Yield the new text of a choice, if there is some or the choice has ended."""
        output = call.take(choice.index)
        pending.add(output)
        completion = None
        if choice.finish is not None:
            scores = self._engine.scores.pop(choice.uid, Scores([], []))
            completion = pending.complete(choice, self.tokenizer.vocabulary, scores)
        if output.text or completion is not None:
            yield Piece(pending.index, output.text, completion)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this LLM is closed")

    def _params(
        self, sampling: inputs.Sampling, count: int, changes: dict[str, Any]
    ) -> list[SamplingParams]:
        """Return the parameters of each prompt. changes: fields to replace, for all prompts."""
        for name in changes:
            if name not in SamplingParams.__struct_fields__:
                near = near_names(name, (*SamplingParams.__struct_fields__, "sampling"))
                raise InvalidRequest(f"there is no parameter {name!r}{near}", param=name)
        sampling = self.default_sampling() if sampling is None else sampling
        given: Any = sampling
        is_one = isinstance(given, (SamplingParams, dict))  # `checked` refuses a dict
        if is_one:
            return [inputs.checked(given, changes)] * count
        params = [inputs.checked(each, changes) for each in given]
        if len(params) != count:
            raise InvalidRequest(f"sampling has {len(params)} entries for {count} prompts")
        return params


def _collect(
    pieces: Generator[Piece, None, None], count: int, single: bool, progress: bool
) -> Completion | list[Completion]:
    """Return the one completion of a single prompt, or all `count` completions in their order."""
    done: dict[int, Completion] = {}
    with closing(pieces), Progress(total=count, unit="req", disable=not progress) as bar:
        for piece in pieces:
            if piece.completion is not None:
                done[piece.index] = piece.completion
                bar.update()
    assert len(done) == count, "every request must have ended; this is a bug"
    return done[0] if single else [done[index] for index in range(count)]
