"""What the offline LLM hands back, and how it is put together from scheduler outputs."""

from dataclasses import dataclass, field

from minisgl.core import FinishReason
from minisgl.message import Finished, PrefillDone, TokenLogprobs
from minisgl.tokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation.

    text             does not include the stop token; token_ids do.
    error            why finish_reason is ERROR: this input failed, for example because its prompt
                     is too long. The other inputs of the same call are not affected.
    logprobs         one entry per token of token_ids, if the sampling parameters ask for them.
    prompt_logprobs  one entry per part of the prompt, without its first token; the parts are in
                     order. Empty if the sampling parameters do not ask for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one generation of a stream; completion is there in its last piece."""

    index: int
    text: str
    completion: Completion | None = None


@dataclass(slots=True)
class Generation:
    """One generation in the making. whole: its text is made when it is done, not piece by piece.

    prefill_done: arrives before any of its outputs.
    """

    index: int
    stream: TextStream
    whole: bool
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prefill_done: PrefillDone = field(init=False)
    completion: Completion | None = None

    def push(self, token_id: int, ends_by_stop: bool) -> Piece | None:
        """One more token. ends_by_stop: it is the stop token, which is not text."""
        if self.completion is not None:
            return None  # a stop string ended it; the scheduler has not heard of it yet
        self.token_ids.append(token_id)
        if self.whole:
            return None
        text = self.stream.push(token_id, is_text=not ends_by_stop)
        self.parts.append(text)
        if self.stream.stopped:
            self.completion = self._complete(FinishReason.STOP, None)
        return Piece(self.index, text, self.completion) if text or self.completion else None

    def finish(self, finished: Finished) -> Piece | None:
        """The terminal message; the text that was withheld comes out."""
        if self.completion is not None:
            return None
        if self.whole:
            ends_by_stop = finished.reason is FinishReason.STOP
            texts = self.token_ids[:-1] if ends_by_stop else self.token_ids
            self.parts = [self.stream.push(token_id) for token_id in texts]
        text = self.stream.finish()
        self.parts.append(text)
        reason = FinishReason.STOP if self.stream.stopped else finished.reason
        self.completion = self._complete(reason, finished.error)
        return Piece(self.index, text, self.completion)

    def _complete(self, reason: FinishReason, error: str | None) -> Completion:
        return Completion(
            text="".join(self.parts),
            token_ids=self.token_ids,
            finish_reason=reason,
            prompt_tokens=self.prefill_done.prompt_tokens,
            cached_tokens=self.prefill_done.cached_tokens,
            error=error,
            logprobs=self.logprobs[: len(self.token_ids)],  # not what came after a stop string
            prompt_logprobs=self.prompt_logprobs,
        )
