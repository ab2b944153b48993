"""What one req has to tell: its text, and beside it ids, log-probabilities and reasoning."""

import array

from minisgl.core import FinishReason
from minisgl.message import (
    Finished,
    PrefillDone,
    PromptTokenLogprobs,
    TextSpec,
    TextUpdate,
    TokenLogprobs,
    TokenText,
)
from minisgl.tokenizer.stream import TextStream
from minisgl.tokenizer.vocab import Vocabulary

Top = list[tuple[int, float]]  # ids and log-probabilities, the most likely first


class OpenAnswer:
    """State of one open req; `take` gives what is new.

    The log-probability of a token is told with the first character of its text, so that none is
    told of a token that a stop string cuts off.
    """

    def __init__(self, vocabulary: Vocabulary, opened: PrefillDone) -> None:
        spec = opened.text or TextSpec()
        self.stream = TextStream(vocabulary, spec)
        self._vocabulary = vocabulary
        self._opened = opened
        self._spec = spec
        self._announced = False  # the API server has had a first update
        self._text = self._reasoning = ""
        self._reasoning_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[TokenText] = []
        self._prompt_ids = array.array("i", spec.prompt_ids)
        shown = TextSpec(skip_special_tokens=spec.skip_special_tokens)
        self._prompt = TextStream(vocabulary, shown)
        self._prompt_logprobs: list[TokenText] = []
        if self._prompt_ids:
            self._add_prompt_token(self._prompt_ids[0], None, [])
        think_ids = vocabulary.think_ids if spec.reasoning else None
        self._think_ids = think_ids or (-1, -1)
        marks = [token_id for token_id in spec.prompt_tail if token_id in self._think_ids]
        self._reasons = bool(marks) and marks[-1] == self._think_ids[0]
        self._at_border = self._reasons

    def push(self, token_id: int, is_text: bool, found: TokenLogprobs | None) -> None:
        """One more token; is_text: it does not merely end the text."""
        if self._spec.silent:
            return
        stream = self.stream
        if self._spec.token_ids:
            self._token_ids.append(token_id)
        if token_id in self._think_ids:
            stream.push(token_id, is_text=False)
            self._add(stream.flush())
            self._reasons, self._at_border = token_id == self._think_ids[0], True
            return
        self._reasoning_tokens += self._reasons
        if found is not None:
            offset = self._prompt.offset(None) + stream.offset(token_id if is_text else None)
            top = list(zip(found.top_ids, found.top_logprobs, strict=True))
            entry = self._token_text(token_id, found.logprob, offset, top, not is_text)
            self._logprobs.append(entry)
        self._add(stream.push(token_id, is_text))

    def push_prompt(self, found: PromptTokenLogprobs) -> None:
        """Log-probabilities of prompt tokens, in order."""
        for index, logprob in enumerate(found.logprobs):
            top = zip(found.top_ids[index], found.top_logprobs[index], strict=True)
            token_id = self._prompt_ids[found.position + index]
            self._add_prompt_token(token_id, logprob, list(top))

    def take(self, finished: Finished | None) -> TextUpdate | None:
        """What is new; None when nothing is. finished: the terminal message has come, too."""
        stream = self.stream
        if finished is not None:
            self._add(stream.finish())  # may complete a stop string by a cut character
        stopped = stream.stopped
        logprobs = self._certain(finished is not None and not stopped)
        told = self._text or self._reasoning or self._token_ids or logprobs or self._prompt_logprobs
        if not told and self._announced and not stopped and finished is None:
            return None
        self._announced = True
        finish = None
        if stopped:
            finish = FinishReason.STOP
        elif finished is not None:
            finish = finished.reason
            if self._spec.silent and finish is FinishReason.STOP:
                finish = FinishReason.LENGTH
        update = TextUpdate(
            uid=self._opened.uid,
            text=self._text,
            completion_tokens=stream.tokens,
            prompt_tokens=self._opened.prompt_tokens,
            cached_tokens=self._opened.cached_tokens,
            token_ids=self._token_ids,
            reasoning=self._reasoning,
            reasoning_tokens=self._reasoning_tokens,
            prompt_logprobs=self._prompt_logprobs,
            logprobs=logprobs,
            finish=finish,
            error=finished.error if finished is not None else None,
            error_kind=finished.error_kind if finished is not None else "",
            stopped=stopped and finished is None,
            admitted_s=self._opened.admitted_s,
        )
        self._text = self._reasoning = ""
        self._token_ids, self._prompt_logprobs = [], []
        return update

    def _add(self, text: str) -> None:
        if self._at_border:
            text = text.lstrip("\n")
            self._at_border = not text
        if self._reasons:
            self._reasoning += text
        else:
            self._text += text

    def _certain(self, all_of_them: bool) -> list[TokenText]:
        """Take those whose text has been given out, at least in part."""
        pending, count = self._logprobs, len(self._logprobs)
        if pending and not all_of_them:
            told = self._prompt.offset(None) + self.stream.emitted_chars
            count = next((i for i, entry in enumerate(pending) if entry.offset >= told), count)
        self._logprobs = pending[count:]
        return pending[:count]

    def _add_prompt_token(self, token_id: int, logprob: float | None, top: Top) -> None:
        entry = self._token_text(token_id, logprob, self._prompt.offset(token_id), top)
        self._prompt_logprobs.append(entry)
        self._prompt.push(token_id)

    def _token_text(
        self, token_id: int, logprob: float | None, offset: int, top: Top, ends: bool = False
    ) -> TokenText:
        data = self._vocabulary.token_bytes
        shown = [(data(other, False), value) for other, value in top]
        return TokenText(data(token_id, False), logprob, offset, shown, ends)
