"""Tokens of one req to text, incrementally: characters across tokens, and stop strings.

No sockets and no clock in here. Whatever the chunking, the concatenated pieces are the decode of
all tokens, cut at the first stop string.
"""

import codecs
from collections.abc import Sequence

from minisgl.message import TextSpec
from minisgl.tokenizer.vocab import Vocabulary


class StopMatcher:
    """Cuts text at the stop string that is complete first (of two at once, the longer).

    Text is withheld only as long as it may be the beginning of a stop string.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """Text that is certain to precede any stop string; "" after the match."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        self.stopped = bool(ends)
        if ends:
            end, minus_length = min(ends)
            self._held = ""
            return text[: end if self._include_stop else end + minus_length]
        certain = len(text) - max(_begun(stop, text) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The withheld text, when no more will come that could go on with it."""
        held, self._held = self._held, ""
        return held


def _begun(stop: str, text: str) -> int:
    """With how many characters of its beginning, but not all, the text ends."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) - start if start >= 0 else 0


class TextStream:
    """The text of one req, piece by piece, as its spec says.

    emitted_chars: of those decoded so far, given out; the rest is withheld or cut.
    """

    def __init__(self, vocabulary: Vocabulary, spec: TextSpec) -> None:
        self._vocabulary = vocabulary
        self._skip_special = spec.skip_special_tokens
        self._min_tokens = spec.min_tokens if spec.stop else 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._matcher = StopMatcher(spec.stop, spec.include_stop)
        self.tokens = self.emitted_chars = self._chars = 0
        for token_id in spec.prompt_tail:
            self._characters.decode(vocabulary.token_bytes(token_id, self._skip_special))

    @property
    def stopped(self) -> bool:
        """A stop string has been seen: the text is complete."""
        return self._matcher.stopped

    def offset(self, token_id: int | None) -> int:
        """Characters of the text before this next token, or of all of it if no more come (None)."""
        data = b"."
        if token_id is not None:
            data = self._vocabulary.token_bytes(token_id, self._skip_special)
        begun, _ = self._characters.getstate()
        # What does not go on with a begun character makes one of it.
        behind = (begun + data[:1]).decode("utf-8", "replace")
        return self._chars + max(len(behind) - 1, 0)

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
        return self._emit(self._characters.decode(b"", final=True)) + self.flush()

    def flush(self) -> str:
        """What was withheld for a begun stop string, which is now given up."""
        text = self._matcher.flush()
        self.emitted_chars += len(text)
        return text

    def _emit(self, text: str) -> str:
        self._chars += len(text)
        if self.tokens >= self._min_tokens:
            text = self._matcher.feed(text)
        self.emitted_chars += len(text)
        return text
