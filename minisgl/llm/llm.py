"""`LLM`: text generation without a server, on the scheduler and the engine of the server."""

import itertools
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from math import inf
from typing import Any, Self

import msgspec
import numpy as np

from minisgl.core import (
    ConfigError,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    ModelFacts,
    SamplingParams,
    SchedulerConfig,
    StepCost,
)
from minisgl.demo import model_path as demo_model_path
from minisgl.engine import DEFAULT_EXTENSIONS, Extensions
from minisgl.llm import inputs
from minisgl.llm.constraints import Constraints
from minisgl.llm.results import Completion, PendingText, Piece
from minisgl.llm.workers import LocalWorker, RankWorkers
from minisgl.message.messages import PROMPT_TAIL_TOKENS, AbortReq, AddReq, StepOutput, TextOptions
from minisgl.settings.child import check_before_weights
from minisgl.settings.hub import resolve_model
from minisgl.tokenizer import TextStream, TextTokenizer
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
        if model is None:
            path = str(demo_model_path())
        else:
            check = partial(check_before_weights, engine_config)
            path = resolve_model(model, revision, not engine_config.dummy_weight, check)
        engine_config = msgspec.structs.replace(engine_config, model_path=path)
        self.tokenizer = TextTokenizer(path)
        # The tokenizer is part of reference cycles, so it outlives a dropped LLM.
        weakref.finalize(self, self.tokenizer.close)
        self._constraints = Constraints(path, self.tokenizer)
        self.worker: LocalWorker | RankWorkers
        if tp == 1:
            self.worker = LocalWorker(engine_config, scheduler_config, extensions, step_cost)
        elif step_cost is not None:
            raise ConfigError(f"step_cost needs tp=1, not {tp}; leave step_cost out")
        elif extensions is DEFAULT_EXTENSIONS:
            self.worker = RankWorkers(engine_config, scheduler_config)
        else:
            raise ConfigError(
                f"extensions need tp=1, not {tp}: start the ranks with scheduler.run_scheduler"
            )
        self.facts: ModelFacts = self.worker.facts
        self._uids = itertools.count(1)
        self._running: dict[int, PendingText] = {}
        self._closed = False

    def default_sampling(self) -> SamplingParams:
        """The sampling parameters that the model's generation config recommends."""
        return SamplingParams(**self.facts.sampling_defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: inputs.Prompt | Sequence[inputs.Prompt],
        sampling: inputs.Sampling = None,
        *,
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
        pieces = self._stream(listed, params, stop, not stop, None, priority, prediction)
        return _collect(pieces, len(listed), single, progress)

    def chat(
        self,
        conversations: inputs.Conversation | Sequence[inputs.Conversation],
        sampling: inputs.Sampling = None,
        *,
        stop: inputs.Stop = (),
        progress: bool = True,
        template_options: dict[str, Any] | None = None,
        prediction: inputs.Prediction = None,
        **parameters: Any,
    ) -> Completion | list[Completion]:
        """Answer one conversation, or a list of conversations, with the model's chat template.

        A conversation is a list of messages with `role` and `content`. template_options: variables
        for the template. The other parameters, the result and the errors are as in `generate`.
        """
        single, listed = inputs.as_list(conversations, dict, inputs.NOT_A_CONVERSATION)
        chats = [inputs.checked_conversation(each) for each in listed]
        options = inputs.checked_options(template_options)
        prompts = [self.tokenizer.encode_chat(chat, options) for chat in chats]
        find = self.tokenizer.prefixes.find
        prefixes = [find(ids, chat, options) for ids, chat in zip(prompts, chats, strict=True)]
        params = self._params(sampling, len(prompts), parameters)
        pieces = self._stream(
            prompts, params, stop, not stop, options, prediction=prediction, prefixes=prefixes
        )
        return _collect(pieces, len(listed), single, progress)

    def stream(
        self,
        prompts: inputs.Prompt | Sequence[inputs.Prompt],
        sampling: inputs.Sampling = None,
        *,
        stop: inputs.Stop = (),
        **parameters: Any,
    ) -> Iterator[Piece]:
        """Complete prompts as `generate` does, and yield the text in pieces as it is generated.

        Prompts with the highest max_tokens start first, so that no long answer is generated alone
        at the end. If the caller leaves the loop early, the unfinished prompts are aborted.
        """
        _, listed = inputs.as_list(prompts, (int, np.integer), inputs.NOT_A_PROMPT)
        return self._stream(listed, self._params(sampling, len(listed), parameters), stop)

    def close(self) -> None:
        """Free the model and the KV pool. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.worker.close()
            self.tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _stream(
        self,
        prompts: Sequence[inputs.Prompt],
        params: Sequence[SamplingParams],
        stop: inputs.Stop,
        text_at_end: bool = False,
        chat_options: dict[str, Any] | None = None,
        priority: inputs.Priority = 0,
        prediction: inputs.Prediction = None,
        prefixes: Sequence[tuple[int, int]] = (),
    ) -> Generator[Piece, None, None]:
        """text_at_end: detokenise each generation once, when it ends.

        chat_options: the prompts are rendered chats, with these variables of the template.
        prefixes: of each chat, as in AddReq.
        """
        self._check_open()
        if self._running:
            raise InvalidRequest("one call at a time: read the open stream to its end or close it")
        stop_strings = inputs.stop_list(stop)
        priorities = inputs.priority_list(priority, len(prompts))
        predictions = inputs.prediction_list(prediction, len(prompts), self.tokenizer)
        # A second Ctrl-C may have left requests of the last call running.
        self.worker.abort_and_wait(())
        running = self._running
        try:
            # `stream` explains this order.
            for index in sorted(range(len(params)), key=lambda i: -(params[i].max_tokens or inf)):
                ids = inputs.as_ids(prompts[index], self.tokenizer)
                options = TextOptions(
                    prompt_tail=ids[-PROMPT_TAIL_TOKENS:].tolist(),
                    stop=stop_strings,
                    min_tokens=params[index].min_tokens,
                )
                uid = next(self._uids)
                message = AddReq(
                    uid=uid,
                    token_ids=ids.tobytes(),
                    sampling=self._constraints.for_prompt(params[index], ids, chat_options),
                    prediction=predictions[index] if self.facts.drafts else b"",
                    priority=priorities[index],
                    prefixes=prefixes[index] if prefixes else (0, 0),
                )
                stream = TextStream(self.tokenizer.vocabulary, options)
                running[uid] = PendingText(index, stream, text_at_end, ids)
                self.worker.send(message)
            while running:
                for output in self.worker.step():
                    yield from self._read(output)
                self._check_open()
        finally:
            self._running = {}
            if not self._closed:
                self.worker.abort_and_wait(running)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this LLM is closed")

    def _read(self, output: StepOutput) -> Iterator[Piece]:
        """Add one step's output to the running generations and yield their new text."""
        running = self._running
        for done in output.prefill_done:
            running[done.uid].prefill_done = done
        for prompt_logprobs in output.prompt_logprobs:
            running[prompt_logprobs.uid].prompt_logprobs.append(prompt_logprobs)
        for logprobs in output.logprobs:
            running[logprobs.uid].logprobs.append(logprobs)
        stopped = {end.uid for end in output.finished if end.reason is FinishReason.STOP}
        last = {uid: index for index, uid in enumerate(output.uids)}
        for index, (uid, token_id) in enumerate(zip(output.uids, output.token_ids, strict=True)):
            ends = uid in stopped and last[uid] == index
            piece = running[uid].push(token_id, is_stop_token=ends)
            if piece is not None:
                if piece.completion is not None:  # a stop string ended the text
                    self.worker.send(AbortReq(uid=uid, reason=FinishReason.STOP))
                yield piece
        for finished in output.finished:
            piece = running.pop(finished.uid).finish(finished)
            if piece is not None:
                yield piece

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
        params = [given] * count if is_one else list(given)
        if len(params) != count:
            raise InvalidRequest(f"sampling has {len(params)} entries for {count} prompts")
        return [self._constraints.compile(inputs.checked(each, changes)) for each in params]


def _collect(
    pieces: Generator[Piece, None, None], count: int, single: bool, progress: bool
) -> Completion | list[Completion]:
    """Return the completion of a single prompt, or those of `count` prompts in their order."""
    done: dict[int, Completion] = {}
    with closing(pieces), Progress(total=count, unit="req", disable=not progress) as bar:
        for piece in pieces:
            if piece.completion is not None:
                done[piece.index] = piece.completion
                bar.update()
    assert len(done) == count, "every request must have ended; this is a bug"
    return done[0] if single else [done[index] for index in range(count)]
