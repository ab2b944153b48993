"""Decodes the tokens of one request one by one, and cuts the text at the first stop string.

A character may span several tokens. The pieces of text, joined, equal the text of all tokens
decoded together and cut at the first stop string. This holds for every split of a text into tokens.
This module does no I/O and reads no clock.
"""

import codecs
from collections.abc import Sequence

from minisgl.message.messages import TextOptions
from minisgl.tokenizer.vocab import Vocabulary

_Decoder = codecs.getincrementaldecoder("utf-8")


class StopMatcher:
    """Cuts text at the first complete stop string.

    Of two stop strings that end at the same character, the longer one counts. The matcher withholds
    text only while that text may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._withheld = ""
        self.stopped = False
        self.found = ""  # the stop string that ended the text

    def feed(self, text: str) -> str:
        """Add text. Returns the text that cannot belong to a stop string; "" once stopped."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._withheld + text
        # Each pair is (end of the match, minus its length). The smallest pair is the match that
        # ends first. If several matches end there, it is the longest of them.
        matches = [
            (text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text
        ]
        if matches:
            self.stopped = True
            self._withheld = ""
            end, minus_length = min(matches)
            self.found = text[end + minus_length : end]
            return text[: end if self._include_stop else end + minus_length]
        certain = len(text) - max(partial_match(stop, text) for stop in self._stops)
        self._withheld = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """Return the withheld text and forget it. Call this when no further text will come."""
        withheld, self._withheld = self._withheld, ""
        return withheld


def partial_match(stop: str, text: str) -> int:
    """The number of characters at the end of `text` that begin `stop` without completing it."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


class TextStream:
    """The text of one request, piece by piece, under its text options.

    tokens         number of pushed tokens, including the terminating token.
    emitted_chars  characters of the decoded text that have been returned; the others are withheld
                   or cut off by a stop string.
    """

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self.vocabulary = vocabulary
        self._skip_special = options.skip_special_tokens
        self._min_tokens = options.min_tokens if options.stop else 0
        self._decoder = _Decoder("replace")
        self._matcher = StopMatcher(options.stop, options.include_stop)
        self.tokens = 0
        self.emitted_chars = 0
        self._decoded_chars = 0
        for token_id in options.prompt_tail:
            self._decoder.decode(vocabulary.token_bytes(token_id, self._skip_special))

    @property
    def stopped(self) -> bool:
        """A stop string has ended the text."""
        return self._matcher.stopped

    @property
    def stop_string(self) -> str:
        """The stop string that has ended the text, or ""."""
        return self._matcher.found

    def offset(self, token_id: int | None) -> int:
        """The number of characters of the text before `token_id`, if it is the next token.

        token_id None: the number of characters of the text so far.
        """
        data = b"."
        if token_id is not None:
            data = self.vocabulary.token_bytes(token_id, self._skip_special)
        incomplete, _ = self._decoder.getstate()
        # A byte that does not continue the incomplete character turns it into U+FFFD. The U+FFFD
        # then stands before this token.
        decoded = (incomplete + data[:1]).decode("utf-8", "replace")
        return self._decoded_chars + max(len(decoded) - 1, 0)

    def push(self, token_ids: Sequence[int], is_text: bool = True) -> str:
        """Add tokens and return the new text.

        token_ids: one token, or without stop strings any number of them.
        is_text: False for a terminating token. It counts as a token and has no text.
        """
        if self.stopped:
            return ""
        self.tokens += len(token_ids)
        if not is_text:
            return ""
        data = self.vocabulary.join(token_ids, self._skip_special)
        return self._emit(self._decoder.decode(data))

    def finish(self) -> str:
        """Return the text that was withheld as a partial stop string, and stop withholding it.

        An incomplete character becomes U+FFFD.
        """
        text = self._emit(self._decoder.decode(b"", final=True))
        withheld = self._matcher.flush()
        self.emitted_chars += len(withheld)
        return text + withheld

    def _emit(self, text: str) -> str:
        self._decoded_chars += len(text)
        if self.tokens >= self._min_tokens:
            text = self._matcher.feed(text)
        self.emitted_chars += len(text)
        return text
