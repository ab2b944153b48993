"""`ToolCallParser`: finds the tool calls in the text of one answer, piece by piece.

Text that can no longer belong to a call is content. Text that may belong to a call is withheld.
Text that looked like a call and is no call becomes content. White space beside a call belongs to
the format: neither the content nor the call contains it.
"""

import json
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from minisgl.message.messages import ToolCallDelta
from minisgl.tokenizer.text_stream import partial_match
from minisgl.tool_calls.reader import NotACall, Reader, Steps
from minisgl.tool_calls.schema import ParameterTypes

if TYPE_CHECKING:
    from minisgl.tool_calls.format import Format

# The parser searches only _SEARCHED_CHARS of a failed call for further calls, and reads text in
# pieces of at most _PIECE_CHARS. The cost is therefore linear for every text.
_SEARCHED_CHARS = 1024
_PIECE_CHARS = 4096
_MAX_SPACE = 256  # White space that is withheld because a call may follow.


class Calls:
    """The content and the calls of one answer, as a parser and the reader of a format report them.

    Each report of a call commits the text that the reader has read.

    parameters  the types of the parameters of each tool.
    is_open     the last call has not ended.
    is_last     no content has followed the last call.
    reader      the text of the open call.
    _pieces     the newest pieces of arguments. They are no delta yet.
    _rest       the text that completes the arguments if the call ends here.
    """

    def __init__(self, parameters: ParameterTypes, id_chars: int = 0) -> None:
        self.parameters = parameters
        self.is_open = False
        self.is_last = False
        self.reader = Reader("")
        self._id_chars = id_chars
        self._count = 0
        self._content: list[str] = []
        self._deltas: list[ToolCallDelta] = []
        self._pieces: list[str] = []
        self._rest = ""

    def text(self, content: str) -> None:
        """Add content, which stands outside of calls."""
        if content:
            self._content.append(content)
            self.is_last = False

    def start(self, name: str) -> None:
        """Begin a call. Raises NotACall for an empty name.

        A call without a marker must name a known tool, because its text may be an ordinary answer.
        Raises NotACall for another name.
        """
        if not name or (self.reader.is_bare and name not in self.parameters):
            raise NotACall
        self._join_pieces()
        size = self._id_chars
        call_id = secrets.token_hex(size)[:size] if size else f"call_{secrets.token_hex(12)}"
        self._deltas.append(ToolCallDelta(self._count, "", call_id, name))
        self._count += 1
        self.is_open, self.is_last, self._rest = True, True, "{}"
        self.reader.commit()

    def argument(self, key: str) -> None:
        """Begin the next argument. The JSON text of its value follows as `arguments`."""
        before = "{" if self._rest == "{}" else ", "
        self.arguments(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        self._rest = "}"

    def arguments(self, piece: str) -> None:
        """Add a piece of the JSON text of the arguments."""
        if piece:
            self._pieces.append(piece)
            if self._rest == "{}":
                self._rest = ""
        self.reader.commit()

    def end(self) -> None:
        """Complete the call. A call without arguments gets {}."""
        self.arguments(self._rest)
        self.is_open = False

    def take(self) -> tuple[str, list[ToolCallDelta]]:
        """Return the content and the deltas of calls since the last call of this method."""
        self._join_pieces()
        content, deltas = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return content, deltas

    def _join_pieces(self) -> None:
        if self._pieces:
            self._deltas.append(ToolCallDelta(self._count - 1, "".join(self._pieces)))
            self._pieces = []


class ToolCallParser:
    """Splits the text of one answer into content and tool calls. Implements CallParser.

        parser = HERMES.open({"now": {}}, {})
        parser.feed('Let me see.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        parser.finish()
        parser.take()      # "Let me see.", [ToolCallDelta(0, "", "call_...", "now"), ...]

    marker_ids  the special tokens that are markers, with their texts.
    calls       the content and the calls.
    failures    number of markers without a call, and of calls that began and were not completed.
    """

    has_sections = in_header = in_reasoning = False

    def __init__(
        self, format: "Format", parameters: ParameterTypes, marker_ids: Mapping[int, str]
    ) -> None:
        self.marker_ids = marker_ids
        self.failures = 0
        self._format = format
        special = marker_ids.values()
        # A start that is a special token counts only as this token, and not as text.
        self._starts = tuple(start for start in format.starts if start not in special)
        self.calls = Calls(parameters, format.id_chars)
        self.take = self.calls.take
        self._withheld = ""
        self._may_be_bare = bool(format.bare)
        self._steps: Steps[None] | None = None

    def feed(self, text: str, is_marker: bool = False) -> None:
        """Add text. is_marker: it is the whole text of a special token of `marker_ids`."""
        if is_marker and text in self._format.starts:
            self._end_call()  # A start does not occur inside of a call.
            before, self._withheld = self._withheld, ""
            self._open(before, text, "")
            return
        for begin in range(0, len(text), _PIECE_CHARS):
            self._feed(text[begin : begin + _PIECE_CHARS])

    def begin(self) -> None:
        """Begin the answer. The format does not depend on the end of the prompt."""

    def finish(self) -> None:
        """End the answer: withheld text becomes content."""
        self._end_call()
        if not (self.calls.is_last and self._withheld.isspace()):
            self.calls.text(self._withheld)
        self._withheld = ""

    def _feed(self, text: str) -> None:
        rest = text
        while rest:
            if self._steps is None:
                rest = self._find_start(rest)
            else:
                self.calls.reader.feed(rest)
                rest = self._advance(self._steps)

    def _end_call(self) -> None:
        """End the open call, if there is one, as if the answer ended here."""
        while self._steps is not None:
            self.calls.reader.ended = True
            self._feed(self._advance(self._steps))

    def _find_start(self, text: str) -> str:
        """Add text outside of calls. Returns the part of it that follows calls."""
        text = self._withheld + text
        self._withheld = ""
        if self._may_be_bare:
            answer = text.lstrip()
            if not answer and len(text) <= _MAX_SPACE:
                self._withheld = text
                return ""
            self._may_be_bare = False
            if answer[:1] and answer[0] in self._format.bare:
                return self._open(text[: len(text) - len(answer)], "", answer)
        begins = [(at, -len(s), s) for s in self._starts if (at := text.find(s)) >= 0]
        if begins:
            at, _, start = min(begins)
            return self._open(text[:at], start, text[at + len(start) :])
        partial = max((partial_match(start, text) for start in self._starts), default=0)
        certain = text[: len(text) - partial]
        content = certain.rstrip()
        if len(certain) - len(content) > _MAX_SPACE:
            content = certain
        self.calls.text(content)
        self._withheld = text[len(content) :]
        return ""

    def _open(self, before: str, start: str, rest: str) -> str:
        """Begin to read calls after this text. Returns the part of `rest` that follows them."""
        content = before.rstrip()
        self.calls.text(content)
        self._may_be_bare = False
        reader = self.calls.reader = Reader(before[len(content) :] + start, is_bare=not start)
        self._steps = self._format.read(reader, self.calls, start)
        reader.feed(rest)
        return self._advance(self._steps)

    def _advance(self, steps: Steps[None]) -> str:
        """Read on. Returns the text that belongs to no call; "" if the call needs more text."""
        is_call = True
        try:
            if next(steps, "ended") is None:  # a step yields None
                return ""
        except NotACall:
            is_call = False
        self._steps = None
        reader = self.calls.reader
        held, rest = reader.split()
        if not is_call:
            self.failures += self.calls.is_open or not reader.is_bare
            # At least the marker becomes content, so that the search cannot find it again.
            certain = len(reader.prefix) if len(held) <= _SEARCHED_CHARS else len(held)
            self.calls.text(held[:certain])
            held = held[certain:]
        self.calls.is_open = False
        return held + rest
