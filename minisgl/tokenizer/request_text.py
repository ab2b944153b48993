"""`RequestText`: the text, reasoning and tool calls of one request, made from its tokens."""

import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Protocol

from minisgl.core import FinishReason
from minisgl.message import messages
from minisgl.tokenizer.text_stream import TextStream
from minisgl.tokenizer.vocab import Vocabulary

TopTokens = Iterable[tuple[int, float]]  # pairs of id and log-probability, the most likely first


class CallParser(Protocol):
    """Splits the text of one answer into content and tool calls.

    marker_ids    the special tokens that are markers of calls, with their texts.
    failures      number of texts that began as a call and were not a complete call. The caller sets
                  it to 0 when it has read it.
    has_sections  the markers divide the answer into sections with headers. The parser then gets the
                  last tokens of the prompt first, gets headers apart from the text, and names the
                  sections that are reasoning.
    in_header     the text that comes next belongs to a header.
    in_reasoning  the text that comes next is reasoning.
    """

    marker_ids: Mapping[int, str]
    failures: int
    has_sections: bool

    @property
    def in_header(self) -> bool: ...
    @property
    def in_reasoning(self) -> bool: ...

    def begin(self) -> None:
        """Begin the answer, after the text of the prompt."""

    def feed(self, text: str, is_marker: bool = False) -> None:
        """Add text. is_marker: it is the text of a token of marker_ids."""

    def finish(self) -> None:
        """End the answer."""

    def take(self) -> tuple[str, list[messages.ToolCallDelta]]:
        """Return the content and the calls since the last call of this method."""


class RequestText:
    """The text, reasoning, tool calls, token ids and log-probabilities of one open request.

    `push` adds a token. `take` returns an update with all new output. The log-probability of a
    token is reported with the first character of its text. If a stop string cuts the token off, its
    log-probability is therefore never reported.

    predicted: number of tokens that equal a draft from the prediction.
    kept: with TextOptions.at_end, the tokens so far. The caller adds each token here, in place of a
    call of `push`. None without.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        options: messages.TextOptions,
        done: messages.PrefillDone,
        parser: CallParser | None = None,
    ) -> None:
        self.stream = TextStream(vocabulary, options)
        self.predicted = 0
        self._done = done
        self._options = options
        self._parser = parser
        self._marker_ids = {} if parser is None else parser.marker_ids
        self._has_update = False  # True after the first update of `take`.
        self.kept: list[int] | None = [] if options.at_end else None
        self._text = ""
        self._reasoning = ""
        self._reasoning_tokens = 0
        self._token_ids: list[int] = []
        self._logprobs: list[messages.TokenLogprob] = []
        self._prompt_ids = array.array("i", options.prompt_ids)
        self._prompt_logprobs: list[messages.TokenLogprob] = []
        if self._prompt_ids:
            self._add_prompt_token(self._prompt_ids[0], None, [])
        self._think_ids = vocabulary.think_ids if options.reasoning else (-1, -1)
        # The template may have opened or closed the reasoning at the end of the prompt.
        marks = [token_id for token_id in options.prompt_tail if token_id in self._think_ids]
        self._is_reasoning = bool(marks) and marks[-1] == self._think_ids[0]
        self._strip_newlines = self._is_reasoning
        self._name, self._name_text = "", ""  # of the thinking that begins, and its text so far
        self._sections = parser if parser is not None and parser.has_sections else None
        if self._sections is not None:
            for token_id in options.prompt_tail:
                marker = self._marker_ids.get(token_id)
                self._sections.feed(marker or self._header.push([token_id]), marker is not None)
            self._sections.begin()
            self._is_reasoning = options.reasoning and self._sections.in_reasoning

    @cached_property
    def _prompt(self) -> TextStream:
        """The text of the prompt, for the offsets of log-probabilities."""
        skip = self._options.skip_special_tokens
        return TextStream(self.stream.vocabulary, messages.TextOptions(skip_special_tokens=skip))

    @cached_property
    def _header(self) -> TextStream:
        """The text of the headers of sections."""
        return TextStream(self.stream.vocabulary, messages.TextOptions())

    def push(self, token_id: int, is_text: bool, logprob: messages.TokenLogprobs | None) -> None:
        """Add one output token. is_text: False for a token that only ends the text."""
        if not self._options.silent:
            self._convert([token_id], is_text, logprob)

    def _convert_kept(self, kept: Sequence[int], stopped: bool) -> None:
        """Add all output tokens to the text. stopped: the last one only ends the text.

        The tokens between two markers are added together, except in an answer with sections.
        """
        begin, last = 0, len(kept) - 1
        for index, token_id in enumerate(kept):
            is_mark = token_id in self._think_ids or token_id in self._marker_ids
            if is_mark or self._sections is not None or index == last:
                if begin < index:
                    self._convert(kept[begin:index], True, None)
                self._convert([token_id], index < last or not stopped, None)
                begin = index + 1

    def _convert(
        self, token_ids: Sequence[int], is_text: bool, logprob: messages.TokenLogprobs | None
    ) -> None:
        """Add output tokens to the text: one token, or several of which none is a marker."""
        token_id = token_ids[0]
        if self._options.token_ids:
            self._token_ids += token_ids
        if token_id in self._think_ids:
            self.stream.push(token_ids, is_text=False)
            self._add_text(self.stream.finish())
            self._is_reasoning = token_id == self._think_ids[0]
            self._name = self.stream.vocabulary.think_name if self._is_reasoning else ""
            self._strip_newlines, self._name_text = True, ""
            return
        is_marker = is_text and token_id in self._marker_ids
        # Stop strings and log-probabilities belong to the text of sections only.
        if self._sections is not None and (is_marker or self._sections.in_header):
            self._push_markup(self._sections, token_id, is_marker, is_text)
            return
        if self._is_reasoning:
            self._reasoning_tokens += len(token_ids)
        if logprob is not None:
            offset = self._prompt.offset(None) + self.stream.offset(token_id if is_text else None)
            top = zip(logprob.top_ids[0], logprob.top_logprobs[0], strict=True)
            entry = self._entry(token_id, logprob.logprobs[0], offset, top, ends=not is_text)
            self._logprobs.append(entry)
        if self._parser is not None and is_marker and not self._is_reasoning:
            self._push_markup(self._parser, token_id, is_marker, is_text)
        else:
            self._add_text(self.stream.push(token_ids, is_text))

    def _push_markup(
        self, parser: CallParser, token_id: int, is_marker: bool, is_text: bool
    ) -> None:
        """Pass a marker, even if the text omits it, or a token of a header to the parser."""
        self.stream.push([token_id], is_text=False)
        if is_marker:
            self._add_text(self.stream.finish())  # An incomplete character ends before the marker.
            if self.stream.stopped:
                return
        text = self._marker_ids[token_id] if is_marker else self._header.push([token_id], is_text)
        parser.feed(text, is_marker)
        self._is_reasoning = self._options.reasoning and parser.in_reasoning

    def push_prompt(self, found: messages.TokenLogprobs) -> None:
        """Add the log-probabilities of the next prompt tokens."""
        for index, logprob in enumerate(found.logprobs):
            top = zip(found.top_ids[index], found.top_logprobs[index], strict=True)
            self._add_prompt_token(self._prompt_ids[found.position + index], logprob, top)

    def take(self, finished: messages.Finished | None) -> messages.TextUpdate | None:
        """Return the new output since the last call, or None if there is none.

        finished: the Finished message of this request, once it has arrived.
        """
        stream = self.stream
        if finished is not None:
            self._convert_kept(self.kept or (), finished.reason is FinishReason.STOP)
            self._add_text(stream.finish())  # An incomplete character may complete a stop string.
        stopped = stream.stopped
        finish = finished.reason if finished is not None else None
        # A silent request (max_tokens 0) computes one token that the client does not see. Even if
        # this token is EOS, the length limit ended the request.
        if self._options.silent and finish is FinishReason.STOP:
            finish = FinishReason.LENGTH
        if stopped:
            finish = FinishReason.STOP
        calls, failures = self._take_calls(finish is not None)
        logprobs = self._take_logprobs(everything=finish is not None and not stopped)
        new = (self._text, self._reasoning, self._token_ids, self._prompt_logprobs, calls, logprobs)
        if self._has_update and finish is None and not any(new):
            return None
        self._has_update = True
        update = messages.TextUpdate(
            uid=self._done.uid,
            text=self._text,
            completion_tokens=stream.tokens,
            prompt_tokens=self._done.prompt_tokens,
            cached_tokens=self._done.cached_tokens,
            token_ids=self._token_ids,
            reasoning=self._reasoning,
            reasoning_tokens=self._reasoning_tokens,
            calls=calls,
            call_failures=failures,
            prompt_logprobs=self._prompt_logprobs,
            logprobs=logprobs,
            finish=finish,
            error=finished.error if finished is not None else None,
            error_kind=finished.error_kind if finished is not None else "",
            stopped=stopped and finished is None,
            stop_string=stream.stop_string,
            admitted_s=self._done.admitted_s,
            prediction_tokens=self._done.prediction_tokens,
            # Drafts may repeat a part of the prediction.
            accepted_prediction_tokens=min(self.predicted, self._done.prediction_tokens),
        )
        self._text = self._reasoning = ""
        self._token_ids, self._prompt_logprobs = [], []
        return update

    def _add_text(self, text: str) -> None:
        if self._name:  # The name arrives in pieces, and is no part of the reasoning.
            self._name_text += text
            if self._name.startswith(self._name_text):
                return
            text, self._name = self._name_text.removeprefix(self._name), ""
        if self._strip_newlines:
            text = text.lstrip("\n")
            self._strip_newlines = not text
        if self._is_reasoning:
            self._reasoning += text
        elif self._parser is not None:
            self._parser.feed(text)
        else:
            self._text += text

    def _take_calls(self, is_end: bool) -> tuple[list[messages.ToolCallDelta], int]:
        """Move the content of the parser to the text. Returns the new calls and failures."""
        parser = self._parser
        if parser is None:
            return [], 0
        if is_end:
            parser.finish()
        content, calls = parser.take()
        self._text += content
        failures, parser.failures = parser.failures, 0
        return calls, failures

    def _take_logprobs(self, everything: bool) -> list[messages.TokenLogprob]:
        """Remove and return the entries of tokens whose first character has been returned.

        everything: also the entries of tokens whose text is withheld or empty.
        """
        pending, count = self._logprobs, len(self._logprobs)
        if pending and not everything:
            emitted = self._prompt.offset(None) + self.stream.emitted_chars
            count = next((i for i, entry in enumerate(pending) if entry.offset >= emitted), count)
        self._logprobs = pending[count:]
        return pending[:count]

    def _add_prompt_token(self, token_id: int, logprob: float | None, top: TopTokens) -> None:
        entry = self._entry(token_id, logprob, self._prompt.offset(token_id), top)
        self._prompt_logprobs.append(entry)
        self._prompt.push([token_id])

    def _entry(
        self, token_id: int, logprob: float | None, offset: int, top: TopTokens, ends: bool = False
    ) -> messages.TokenLogprob:
        token_bytes = self.stream.vocabulary.token_bytes
        top_bytes = [(token_bytes(top_id, False), value) for top_id, value in top]
        return messages.TokenLogprob(token_bytes(token_id, False), logprob, offset, top_bytes, ends)
