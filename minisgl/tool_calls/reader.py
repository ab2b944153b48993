"""`Reader`: the unread text of an answer, read by coroutines that wait for more text.

The reader of a format is a generator. It yields wherever the answer so far is too short to go on,
and continues at the same place once more text has arrived. No text is read twice, so the cost is
linear in the length of the answer for every split into pieces.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias, TypeVar

T = TypeVar("T")
# A coroutine that yields while it waits for text, and returns a T.
Steps: TypeAlias = Generator[None, None, T]

MAX_NAME_CHARS = 256
_SPACE = re.compile(r"[ \t\r\n]*")
_STRING_TEXT = re.compile(r'[^"\\]*')
_VALUE_TEXT = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^\s,}\]]*")


class NotACall(Exception):
    """The text does not continue as the format requires."""


def inside_quotes(text: str) -> str:
    """Return the JSON of a string without its quotation marks."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Reader:
    """Text in order of arrival. `held` is the text that was read since the last `commit`.

    prefix: white space and a marker that stand before the text, and belong to the held text.
    is_bare: the text began without a marker.
    """

    def __init__(self, prefix: str, is_bare: bool = False) -> None:
        self.prefix = prefix
        self.is_bare = is_bare
        self.ended = False  # True once no further text will come.
        self._held = [prefix]
        self._text = ""
        self._start = 0  # of the text that is held
        self._at = 0  # of the next character to read

    def feed(self, text: str) -> None:
        """Add text."""
        self._held.append(self._text[self._start : self._at])
        self._text = self._text[self._at :] + text
        self._start = self._at = 0

    def commit(self) -> None:
        """Forget the held text: it is reported as a part of a call."""
        self.prefix = ""
        self._held.clear()
        self._start = self._at

    def split(self) -> tuple[str, str]:
        """Return the held text, and the text that has not been read."""
        held = "".join(self._held) + self._text[self._start : self._at]
        return held, self._text[self._at :]

    def char(self) -> Steps[str]:
        """Return the next character without reading it; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def next(self) -> Steps[str]:
        """Read the next character; "" at the end."""
        char = yield from self.char()
        self._at += len(char)
        return char

    def piece(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the text that has arrived, up to the first character that `pattern` does not match.

        Waits for one character. Returns "" if `pattern` does not match it, and at the end.
        """
        yield from self.char()
        found = pattern.match(self._text, self._at)
        part = found[0] if found is not None else ""
        self._at += len(part)
        return part

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the longest text of characters that each match `pattern`.

        Raises NotACall for more than MAX_NAME_CHARS.
        """
        parts: list[str] = []
        count = 0
        while part := (yield from self.piece(pattern)):
            parts.append(part)
            count += len(part)
            if count > MAX_NAME_CHARS:
                raise NotACall
        return "".join(parts)

    def space(self) -> Steps[str]:
        """Read white space."""
        parts: list[str] = []
        while part := (yield from self.piece(_SPACE)):
            parts.append(part)
        return "".join(parts)

    def comes(self, text: str) -> Steps[bool]:
        """Return True if this text comes next. Reads nothing."""
        while True:
            arrived = self._text[self._at : self._at + len(text)]
            if arrived == text or self.ended or not text.startswith(arrived):
                return arrived == text
            yield

    def literal(self, text: str) -> Steps[bool]:
        """Read this text if it comes next. Returns False, and reads nothing, if it does not."""
        found = yield from self.comes(text)
        self._at += len(text) if found else 0
        return found

    def token(self, text: str) -> Steps[bool]:
        """Read white space, and then this text as `literal` does."""
        yield from self.space()
        return (yield from self.literal(text))

    def expect(self, text: str) -> Steps[None]:
        """Read white space and this text. Raises NotACall if the text does not come next."""
        if not (yield from self.token(text)):
            raise NotACall

    def json_text(self) -> Steps[str]:
        """Read a JSON string of at most MAX_NAME_CHARS and return its value. Raises NotACall."""
        text = ""

        def take(piece: str) -> None:
            nonlocal text
            text += piece
            if len(text) > MAX_NAME_CHARS:
                raise NotACall

        yield from self._json_string(take)
        try:
            value = str(json.loads(text))
            value.encode()  # A lone surrogate cannot be sent to the client.
            return value
        except ValueError:
            raise NotACall from None

    def json_value(self, take: Callable[[str], None]) -> Steps[None]:
        """Read a JSON value and pass it to `take` in pieces, unchanged.

        The value of an object, list or string ends where its brackets or quotes close. Its inside
        is not validated. Raises NotACall if the text ends first.
        """
        if (yield from self.char()) not in ('"', "{", "["):
            take((yield from self.run(_SCALAR)))
            return
        depth = 0
        while char := (yield from self.char()):
            if char == '"':
                yield from self._json_string(take)
            else:
                depth += (char in "{[") - (char in "}]")
                take((yield from self.next()))
            if not depth:
                return
            take((yield from self.piece(_VALUE_TEXT)))
        raise NotACall

    def nested(
        self,
        take: Callable[[str], None],
        brackets: Mapping[str, str],
        ends: str,
        read_scalar: "Callable[[Reader, Callable[[str], None]], Steps[None]]",
        read_key: "Callable[[Reader], Steps[str]] | None" = None,
    ) -> Steps[None]:
        """Read a value of lists and objects, and pass it to `take` in pieces, as JSON.

        brackets: the pair in JSON for each opening bracket. ends: the commas, colons and closing
        brackets that end a scalar. read_key: reads a key of an object and the colon after it; None:
        a key is read as a scalar. Raises NotACall if the text ends first.
        """
        closing: list[str] = []  # the brackets that close the open lists and objects
        separator = ""  # a comma, which JSON does not allow before a closing bracket
        while True:
            while (char := (yield from self.char())).isspace():
                yield from self.next()
            if not char:
                take(separator)
                raise NotACall
            if closing and char in ends:
                yield from self.next()
                separator = f"{char} " if char in ",:" else ""
                if not separator:
                    take(closing.pop())
            else:
                take(separator)
                separator = ""
                if read_key is not None and closing and closing[-1] == "}":
                    take(f"{json.dumps((yield from read_key(self)), ensure_ascii=False)}: ")
                    yield from self.space()
                    char = yield from self.char()
                if char in brackets:
                    yield from self.next()
                    take(brackets[char][0])
                    closing.append(brackets[char][1])
                else:
                    yield from read_scalar(self, take)
            if not closing:
                return

    def _json_string(self, take: Callable[[str], None]) -> Steps[None]:
        yield from self.expect('"')
        take('"')
        while True:
            part = (yield from self.piece(_STRING_TEXT)) or (yield from self.next())
            take(part)
            if part == '"':
                return
            if not part:
                raise NotACall
            if part == "\\":
                take((yield from self.next()))
