"""Tokens of one req to text, incrementally: characters across tokens, and stop strings.

No sockets and no clock in here. Whatever the chunking, the concatenated pieces are the decode of
all tokens, cut at the first stop string.
"""

import codecs
from collections.abc import Sequence

from minisgl.tokenizer.vocab import Vocabulary


class _StopString:
    """Knuth-Morris-Pratt over one stop string: O(1) per character, whatever the text."""

    __slots__ = ("_failure", "_text", "matched")

    def __init__(self, text: str) -> None:
        self._text = text
        self._failure = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = self._failure[length - 1]
            length += text[i] == text[length]
            self._failure[i] = length
        self.matched = 0  # characters of the stop string that end the text so far

    def feed(self, char: str) -> bool:
        """True when the stop string ends with this character."""
        while self.matched and char != self._text[self.matched]:
            self.matched = self._failure[self.matched - 1]
        self.matched += char == self._text[self.matched]
        return self.matched == len(self._text)


class StopMatcher:
    """Cuts text at the stop string that is complete first (of two at once, the longer).

    Text is withheld only as long as it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = [_StopString(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that is certain to precede any stop string; "" after the match."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        for position, char in enumerate(text):
            found = 0
            for stop in self._stops:
                if stop.feed(char):
                    found = max(found, stop.matched)
            if found:
                self.stopped = True
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole if self._include_stop else whole[:-found]
        whole = self._held + text
        keep = max(stop.matched for stop in self._stops)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """The withheld text, when no more will come that could go on with it."""
        for stop in self._stops:
            stop.matched = 0
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one req, piece by piece.

    prompt_tail: the prompt's last ids; a character that begins there and ends in the output comes
    out whole.
    min_tokens: stop strings in the text of the first min_tokens tokens do not count.
    chars, emitted_chars: decoded so far, and of these given out (the rest is withheld or cut).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt_tail: Sequence[int] = (),
        stop: Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._min_tokens = min_tokens if stop else 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(stop, include_stop)
        self.tokens = self.chars = self.emitted_chars = 0
        for token_id in prompt_tail:
            self._characters.decode(vocabulary.token_bytes(token_id, skip_special))

    @property
    def stopped(self) -> bool:
        """A stop string has been seen: the text is complete."""
        return self._matcher.stopped

    def push(self, token_id: int, is_text: bool = True) -> str:
        """New text after one more token; a terminating token counts but is not text."""
        if self.stopped:
            return ""
        self.tokens += 1
        if not is_text:
            return ""
        data = self._vocabulary.token_bytes(token_id, self._skip_special)
        return self._emit(self._characters.decode(data))

    def finish(self) -> str:
        """What was withheld: an incomplete character (as U+FFFD) and a begun stop string."""
        if self.stopped:
            return ""
        text = self._emit(self._characters.decode(b"", final=True))
        return text if self.stopped else text + self.flush()

    def flush(self) -> str:
        """What was withheld for a begun stop string, which is now given up."""
        text = self._matcher.flush()
        self.emitted_chars += len(text)
        return text

    def _emit(self, text: str) -> str:
        self.chars += len(text)
        if self.tokens >= self._min_tokens:
            text = self._matcher.feed(text)
        self.emitted_chars += len(text)
        return text
