"""`LLM`: generate and chat without a server. Same scheduler, only input and output replaced."""

from array import array
from collections.abc import Iterator, Sequence
from math import inf
from typing import Any, Self

import msgspec
import numpy as np
from tqdm import tqdm

from minisgl.core import (
    ConfigError,
    EngineConfig,
    FinishReason,
    InvalidRequest,
    ModelFacts,
    SamplingParams,
    SchedulerConfig,
)
from minisgl.core.hub import resolve_model
from minisgl.demo import model_path as demo_model_path
from minisgl.llm.results import Completion, Generation, Piece
from minisgl.llm.workers import LocalWorker, RankWorkers
from minisgl.message import AbortReq, AddReq, StepOutput, TextOptions
from minisgl.tokenizer import TextStream, TextTokenizer

Prompt = str | Sequence[int]
Conversation = Sequence[dict[str, Any]]
Sampling = SamplingParams | Sequence[SamplingParams] | None
Stop = str | Sequence[str]

_NO_PROMPT = "a prompt is text or a sequence of token ids"


class LLM:
    """A model in this process, or with tp=N in N processes, one for each GPU.

        with LLM("Qwen/Qwen3-0.6B") as llm:
            print(llm.chat([{"role": "user", "content": "Hello!"}]).text)

    Any number of LLMs may live side by side. Not thread-safe: one call at a time.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "auto",
        tp: int = 1,
        page_size: int = 16,
        num_pages: int | None = None,
        memory_ratio: float = 0.9,
        max_running_reqs: int = 256,
        max_seq_len: int | None = None,
        attention_backend: str = "auto",
        cuda_graph_max_bs: int | None = None,
        dummy_weight: bool = False,
        kernel_cache: str | None = None,
        prefill_budget_tokens: int = 8192,
        cache_type: str = "radix",
        overlap: bool = True,
    ) -> None:
        """Load `model`: a folder, a hub id, or None for the embedded demo model.

        The other arguments are those of EngineConfig and SchedulerConfig. Raises ConfigError. With
        tp > 1 every method may raise WorkerDied, within seconds of the end of a process; the LLM
        can then only be closed.
        """
        if model is None:
            path = str(demo_model_path())
        else:
            path = resolve_model(model, revision, weights=not dummy_weight)
        engine_config = EngineConfig(
            model_path=path,
            dtype=dtype,
            device=device,
            tp_size=tp,
            page_size=page_size,
            num_pages=num_pages,
            memory_ratio=memory_ratio,
            max_running_reqs=max_running_reqs,
            max_seq_len=max_seq_len,
            attention_backend=attention_backend,
            cuda_graph_max_bs=cuda_graph_max_bs,
            dummy_weight=dummy_weight,
            kernel_cache=kernel_cache,
        )
        scheduler_config = SchedulerConfig(
            prefill_budget_tokens=prefill_budget_tokens,
            target_step_ms=None,  # nobody waits for single tokens: throughput only
            cache_type=cache_type,
            overlap=overlap,
        )
        self.tokenizer = TextTokenizer.load(path)
        kind = LocalWorker if tp == 1 else RankWorkers
        self.worker: LocalWorker | RankWorkers = kind(engine_config, scheduler_config)
        self.facts: ModelFacts = self.worker.facts
        self._next_uid = 1
        self._running: dict[int, Generation] = {}
        self._closed = False

    def default_sampling(self) -> SamplingParams:
        """What the model's generation config recommends."""
        return SamplingParams(**self.facts.sampling_defaults)  # type: ignore[arg-type]

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        stop: Stop = (),
        progress: bool = True,
    ) -> Completion | list[Completion]:
        """Complete one prompt or many: text, or token ids. One in, one out; many in, a list out.

        sampling: one for all, one per prompt, or None for the model's defaults. stop: strings
        that end a text. Raises InvalidRequest for parameters of a wrong type or out of range, and
        for what is no prompt; an input that cannot be served comes back as a Completion with
        finish_reason ERROR.
        """
        one, many = _listed(prompts, (int, np.integer), _NO_PROMPT)
        return self._run(one, many, sampling, stop, progress)

    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        sampling: Sampling = None,
        *,
        stop: Stop = (),
        progress: bool = True,
        template_options: dict[str, Any] | None = None,
    ) -> Completion | list[Completion]:
        """Answer one conversation (a list of messages) or many, by the model's chat template."""
        one, many = _listed(conversations, dict, "a conversation is a list of messages")
        prompts = [self.tokenizer.encode_chat(list(c), template_options) for c in many]
        return self._run(one, prompts, sampling, stop, progress)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: Sampling = None,
        *,
        stop: Stop = (),
    ) -> Iterator[Piece]:
        """Like generate, piece by piece as text comes; it is the whole that is to end early, so
        what may become longest begins first. Leaving the loop early aborts the rest."""
        _, many = _listed(prompts, (int, np.integer), _NO_PROMPT)
        return self._stream(many, sampling, stop)

    def close(self) -> None:
        """Free the model and the KV pool. Calling it twice is harmless."""
        if not self._closed:
            self._closed = True
            self.worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(
        self, one: bool, prompts: Sequence[Prompt], sampling: Sampling, stop: Stop, progress: bool
    ) -> Completion | list[Completion]:
        done: dict[int, Completion] = {}
        with tqdm(total=len(prompts), unit="req", disable=not progress) as bar:
            for piece in self._stream(prompts, sampling, stop, whole=not stop):
                if piece.completion is not None:
                    done[piece.index] = piece.completion
                    bar.update()
        assert len(done) == len(prompts), "a req ended without a terminal message: this is a bug"
        return done[0] if one else [done[index] for index in range(len(prompts))]

    def _stream(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        stop: Stop,
        whole: bool = False,
    ) -> Iterator[Piece]:
        """whole: nobody looks before the end, so text is made once, when a generation is done."""
        self._check_open()
        if self._running:
            raise InvalidRequest("one call at a time: a stream has not been read to its end")
        stops, params = _stop_strings(stop), self._params(sampling, len(prompts))
        self.worker.settle(())  # what a second Ctrl-C has left
        running = self._running
        encode = self.tokenizer.encode_text
        try:
            # the longest first: none is left to run alone at the end
            for index in sorted(range(len(params)), key=lambda i: -(params[i].max_tokens or inf)):
                prompt, one = prompts[index], params[index]
                ids = _as_ids(encode(prompt) if isinstance(prompt, str) else prompt)
                uid, self._next_uid = self._next_uid, self._next_uid + 1
                options = TextOptions(
                    prompt_tail=ids[-8:].tolist(), stop=stops, min_tokens=one.min_tokens
                )
                text = TextStream(self.tokenizer.vocabulary, options)
                running[uid] = Generation(index, text, whole)
                self.worker.send(AddReq(uid=uid, token_ids=ids.tobytes(), sampling=one))
            while running:
                for output in self.worker.step():
                    yield from self._read(output)
                self._check_open()
        finally:
            self._running = {}
            if not self._closed:
                self.worker.settle(running)

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this LLM is closed")

    def _read(self, output: StepOutput) -> Iterator[Piece]:
        running = self._running
        for done in output.prefill_done:
            running[done.uid].prefill_done = done
        for told in output.prompt_logprobs:
            running[told.uid].prompt_logprobs.append(told)
        for found in output.logprobs:
            running[found.uid].logprobs.append(found)
        by_stop = {f.uid for f in output.finished if f.reason is FinishReason.STOP}
        for uid, token_id in zip(output.uids, output.token_ids, strict=True):
            generation = running[uid]
            piece = generation.push(token_id, ends_by_stop=uid in by_stop)
            if piece is not None:
                if generation.stream.stopped:
                    self.worker.send(AbortReq(uid=uid, reason=FinishReason.STOP))
                yield piece
        for finished in output.finished:
            piece = running.pop(finished.uid).finish(finished)
            if piece is not None:
                yield piece

    def _params(self, sampling: Sampling, count: int) -> list[SamplingParams]:
        sampling = self.default_sampling() if sampling is None else sampling
        params = [sampling] * count if isinstance(sampling, SamplingParams) else list(sampling)
        if len(params) != count:
            raise InvalidRequest(f"{len(params)} sampling parameters for {count} prompts")
        return [_checked(one).seeded() for one in params]


def _listed(given: Any, item: Any, wanted: str) -> tuple[bool, list[Any]]:
    """Whether it is one (a text, or it begins with an `item`); a list of that one, or of all."""
    some = (Sequence, np.ndarray)
    listed = isinstance(given, some)
    one = isinstance(given, str) or (listed and len(given) > 0 and isinstance(given[0], item))
    many = [given] if one else given
    if not listed or not all(isinstance(each, some) for each in many):
        raise InvalidRequest(wanted, param="prompt")
    return one, list(many)


def _as_ids(prompt: Sequence[int]) -> "array[int]":
    """int32, as AddReq holds them. Raises InvalidRequest."""
    try:
        return array("i", iter(prompt))  # of bytes it would take the memory
    except OverflowError:
        raise InvalidRequest("a token id does not fit into 32 bits", param="prompt") from None
    except (TypeError, ValueError):
        raise InvalidRequest(_NO_PROMPT, param="prompt") from None


def _stop_strings(stop: Any) -> list[str]:
    """Raises InvalidRequest."""
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or not all(isinstance(s, str) and s for s in stops):
        raise InvalidRequest("stop must be strings that are not empty", param="stop")
    return list(stops)


def _checked(sampling: Any) -> SamplingParams:
    """The same with values of the declared types. Raises InvalidRequest."""
    if not isinstance(sampling, SamplingParams):
        raise InvalidRequest("sampling parameters are SamplingParams", param="sampling")
    try:
        checked = msgspec.convert(msgspec.structs.asdict(sampling), SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"sampling parameters: {error}", param="sampling") from None
    checked.validate()
    return checked
