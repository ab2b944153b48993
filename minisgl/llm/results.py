"""The results of `LLM`, and their construction from the output of a call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from minisgl.core import FinishReason
from minisgl.message.messages import TokenLogprobs, ToolCallDelta
from minisgl.request.choice import Choice, Output, whole_calls
from minisgl.tokenizer.vocab import Vocabulary


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
class ToolCall:
    """A call of a tool in the answer to a chat. arguments: JSON, as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished generation.

    text             the generated text, without the stop token or stop string that ended it.
    token_ids        the generated tokens, with the stop token.
    error            the error message if finish_reason is ERROR, for example that the prompt is too
                     long. The other prompts of the call are not affected.
    logprobs         one entry for each of token_ids, if the sampling parameters ask for them.
    prompt_logprobs  one entry for each prompt token except the first, if the sampling parameters
                     ask for them. Of the n answers to a prompt, the first has them.
    reasoning        of the answer to a chat: the thinking before the text, which does not have it.
    tool_calls       of the answer to a chat with tools. The text does not have them.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    error: str | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob] = field(default_factory=list)
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one generation of a stream.

    index: position of its completion in the list that `generate` returns for the same arguments:
    that of its prompt, times n, plus the number of the answer. completion: set in the last piece of
    a generation.
    """

    index: int
    text: str
    completion: Completion | None = None


class Scores(NamedTuple):
    """The log-probabilities of one call: of its prompt, and of its output tokens."""

    prompt: list[TokenLogprobs]
    output: list[TokenLogprobs]


@dataclass(slots=True)
class Pending:
    """The output of a generation that is not complete yet. index: as in Piece."""

    index: int
    prompt_ids: Sequence[int]
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)

    def add(self, output: Output) -> None:
        """Add new output."""
        if output.text:
            self.texts.append(output.text)
        if output.details is not None:
            self.reasoning += output.details.reasoning
            self.token_ids += output.details.token_ids
            self.calls += output.details.calls

    def complete(
        self,
        choice: Choice,
        vocabulary: Vocabulary,
        scores: Scores,
    ) -> Completion:
        """The completion of a choice that has ended, with these log-probabilities of its tokens."""
        assert choice.finish is not None, "the choice must have ended; this is a bug"
        ids = [*self.prompt_ids, *self.token_ids] if any(scores) else []
        return Completion(
            text="".join(self.texts),
            token_ids=self.token_ids,
            finish_reason=choice.finish,
            prompt_tokens=choice.latest.prompt_tokens,
            cached_tokens=choice.latest.cached_tokens,
            error=None if choice.error is None else choice.error.message,
            # A stop string drops the later tokens, so their log-probabilities are dropped too.
            logprobs=[*_scored(scores.output[: len(self.token_ids)], ids, vocabulary)],
            prompt_logprobs=[*_scored(scores.prompt, ids, vocabulary)],
            reasoning="".join(self.reasoning),
            tool_calls=[
                ToolCall(part.id, part.name, part.arguments) for part in whole_calls(self.calls)
            ],
        )


def _scored(
    parts: Sequence[TokenLogprobs], ids: Sequence[int], vocabulary: Vocabulary
) -> Iterator[Logprob]:
    """Yield each token of these parts. ids: of the prompt and the output."""

    def scored(token_id: int, logprob: float, top: tuple[Logprob, ...] = ()) -> Logprob:
        return Logprob(token_id, vocabulary.decode([token_id], skip_special=False), logprob, top)

    for part in parts:
        rows = zip(part.logprobs, part.top_ids, part.top_logprobs, strict=True)
        for position, (logprob, top_ids, top_logprobs) in enumerate(rows, part.position):
            top = zip(top_ids, top_logprobs, strict=True)
            yield scored(ids[position], logprob, tuple(scored(*each) for each in top))
