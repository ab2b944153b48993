"""Answers that are a sequence of messages, each with a header that tells its recipient or channel.

The markers are special tokens; text that spells one is text.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, Literal, NamedTuple

from minisgl.tool_calls.grammar import ToolGrammar, WrittenGrammar
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.schema import ParameterTypes

START, MESSAGE = "<|start|>", "<|message|>"
RECIPIENT = re.compile(r"(?:\A|\s)to=(\S+)")
# The prompt ends with the role of the first message. The answer may go on with a recipient.
_MAY_BE_FIRST = re.compile(r"\s*(?:t|to|to=\S*\s*)?")
_MAX_HEADER_CHARS = 1024

Section = Literal["header", "reasoning", "content", "call"]


class MessageParser(ABC):
    """Splits an answer into reasoning, content and tool calls. Implements CallParser.

    The caller passes the last tokens of the prompt to `feed` and then calls `begin`. These tokens
    tell in which section the answer begins. Usually it begins in a header, after the role. A header
    that is cut off by the end of the answer is left out. Text that begins an answer and is no
    header is content. Without tools, messages to functions are content.

    openers      the markers that begin a header.
    in_headers   further markers that may stand in a header.
    failures     number of calls that are not complete.
    """

    openers: ClassVar[tuple[str, ...]] = (START,)
    in_headers: ClassVar[tuple[str, ...]] = ()
    has_sections = True

    def __init__(self, calls: Calls, marker_ids: Mapping[int, str]) -> None:
        self.marker_ids = marker_ids
        self.failures = 0
        self._calls = calls
        self.take = self._calls.take
        self._section: Section = "header"
        self._header = ""
        self._marker = re.compile("|".join(map(re.escape, (*self.openers, *self.in_headers))))

    @property
    def in_header(self) -> bool:
        """The text that comes next belongs to a header."""
        return self._section == "header"

    @property
    def in_reasoning(self) -> bool:
        """The text that comes next is reasoning."""
        return self._section == "reasoning"

    def feed(self, text: str, is_marker: bool = False) -> None:
        """Add text. is_marker: it is the text of a special token of `marker_ids`."""
        if not is_marker:
            self._add(text)
        elif text == MESSAGE and self.in_header:
            self._section = self.open_message(self._header)
        elif self.in_header and text in self.in_headers:
            self._header += text
        else:
            self._end_message()
            self._section = "header" if text in self.openers else "content"
            self._header = text

    def begin(self) -> None:
        """Begin the answer, after the text of the prompt."""
        self.take()
        if not self.in_header:
            return
        markers = self._marker.findall(self._header)
        if markers[-1:] == [START]:
            self._header = ""  # behind the role, so that an answer without a header is content
        elif self._header and not markers:
            self._section = "content"  # the prompt ends in a message that began long before

    def finish(self) -> None:
        """End the answer."""
        self._end_message()
        if self.in_header and not self._marker.search(self._header) and "to=" not in self._header:
            self._calls.text(self._header)
        self._section = "content"

    @abstractmethod
    def open_message(self, header: str) -> Section:
        """Return the section of a message with this header, which has its markers.

        After the header of a call, `call_text` and then `end_call` are called.
        """

    @abstractmethod
    def call_text(self, text: str) -> None:
        """Add text of a message that is a call."""

    @abstractmethod
    def end_call(self) -> None:
        """End a message that is a call."""

    def _add(self, text: str) -> None:
        if self.in_header:
            self._header += text
            is_plain = not self._marker.search(self._header)
            if (is_plain and not _MAY_BE_FIRST.fullmatch(self._header)) or (
                len(self._header) > _MAX_HEADER_CHARS
            ):
                self._section = "content"
                self._calls.text(self._header)
        elif self._section == "call":
            self.call_text(text)
        else:
            self._calls.text(text)

    def _end_message(self) -> None:
        if self._section == "call":
            self.end_call()
            self._section = "content"


class MessageFormat(NamedTuple):
    """A format whose answers are messages.

    name, probe, markers: as in Format. All markers are special tokens.
    open: makes the parser of one answer, as Format.open.
    write: returns the grammar of an answer, as Format.write.
    """

    name: str
    probe: str
    markers: tuple[str, ...]
    open: Callable[[ParameterTypes, Mapping[int, str]], MessageParser]
    write: Callable[[ToolGrammar, Mapping[str, int]], WrittenGrammar]
