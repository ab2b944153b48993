"""The results of `LLM`, and their construction from the scheduler's outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from minisgl.core import FinishReason
from minisgl.message.messages import Finished, PrefillDone, TokenLogprobs
from minisgl.tokenizer import TextStream


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token with its log-probability.

    text  of this token alone. An incomplete character is U+FFFD.
    top   the most likely tokens in the place of this token, the most likely first, as many as the
          sampling parameters ask for.
    """

    token_id: int
    text: str
    logprob: float
    top: tuple["Logprob", ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation.

    text             the generated text, without the stop token or stop string that ended it.
    token_ids        the generated tokens, with the stop token.
    error            the error message if finish_reason is ERROR, for example that the prompt is too
                     long. The other prompts of the call are not affected.
    logprobs         one entry for each of token_ids, if the sampling parameters ask for them.
    prompt_logprobs  one entry for each prompt token except the first, if the sampling parameters
                     ask for them.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one generation of a stream.

    index: position of its prompt in the call. completion: set in the last piece of a generation.
    """

    index: int
    text: str
    completion: Completion | None = None


@dataclass(slots=True)
class PendingText:
    """A generation that is not complete yet.

    index         position of its prompt in the call.
    text_at_end   True to detokenise all tokens once, when the generation ends.
    prefill_done  the scheduler's first message about the generation. It precedes the first token.
    """

    index: int
    stream: TextStream
    text_at_end: bool
    prompt_ids: Sequence[int]
    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prefill_done: PrefillDone = field(init=False)
    completion: Completion | None = None

    def push(self, token_id: int, is_stop_token: bool) -> Piece | None:
        """Add a token. Returns a piece with the new text; None if there is no text to show yet."""
        if self.completion is not None:
            # A stop string ended the text; the scheduler has not aborted the request yet.
            return None
        self.token_ids.append(token_id)
        if self.text_at_end:
            return None
        text = self.stream.push(token_id, is_text=not is_stop_token)
        self.parts.append(text)
        if self.stream.stopped:
            self.completion = self._complete(FinishReason.STOP, None)
        return Piece(self.index, text, self.completion) if text or self.completion else None

    def finish(self, finished: Finished) -> Piece | None:
        """End the generation. Returns the last piece; None if a stop string has ended the text."""
        if self.completion is not None:
            return None
        if self.text_at_end:
            has_stop_token = finished.reason is FinishReason.STOP
            text_ids = self.token_ids[:-1] if has_stop_token else self.token_ids
            self.parts = [self.stream.push(token_id) for token_id in text_ids]
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
            # A stop string drops the later tokens, so their log-probabilities are dropped too.
            logprobs=list(self._logprobs(self.logprobs[: len(self.token_ids)])),
            prompt_logprobs=list(self._logprobs(self.prompt_logprobs)),
        )

    def _logprobs(self, parts: Sequence[TokenLogprobs]) -> Iterator[Logprob]:
        """Yield each token of these parts with its text."""
        ids = [*self.prompt_ids, *self.token_ids] if parts else []
        for part in parts:
            rows = zip(part.logprobs, part.top_ids, part.top_logprobs, strict=True)
            for position, (logprob, top_ids, top_logprobs) in enumerate(rows, part.position):
                top = zip(top_ids, top_logprobs, strict=True)
                yield self._logprob(ids[position], logprob, tuple(self._logprob(*t) for t in top))

    def _logprob(self, token_id: int, logprob: float, top: tuple[Logprob, ...] = ()) -> Logprob:
        text = self.stream.vocabulary.decode([token_id], skip_special=False)
        return Logprob(token_id, text, logprob, top)
