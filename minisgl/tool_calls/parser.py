"""`ToolCallParser`: finds the tool calls in the text of one answer, piece by piece.

Text that can no longer belong to a call is content. Text that may belong to a call is withheld.
Text that looked like a call and is no call becomes content. White space beside a call belongs to
the format: neither the content nor the call contains it.
"""

import itertools
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minisgl.message.messages import ToolCallDelta
from minisgl.tokenizer.detokenizer import CallParser
from minisgl.tokenizer.text_stream import partial_match
from minisgl.tool_calls.grammar import CallGrammar, ToolGrammar, WrittenGrammar, write_grammar
from minisgl.tool_calls.reader import NotACall, Reader, Steps

# The parser searches only _SEARCHED_CHARS of a failed call for further calls, and reads text in
# pieces of at most _PIECE_CHARS. The cost is therefore linear for every text.
_SEARCHED_CHARS = 1024
_PIECE_CHARS = 4096
_MAX_SPACE = 256  # White space that is withheld because a call may follow.
_ID_CHARS = string.ascii_letters + string.digits


class Format(NamedTuple):
    """The form in which the models of a family write tool calls.

    A format has either `read` and `grammar`, or a parser and a writer of its own.

    starts   markers that begin a call or a list of calls, at any place of the answer.
    markers  all markers that may be special tokens, the starts included. The parser
             receives the text of these tokens also with skip_special_tokens.
    read     reads the calls after this marker. At the beginning of an answer the marker may be
             "". When `read` returns or raises NotACall, the text that it has read since its
             last report to Calls is content.
    bare     characters; an answer that begins with one of them may be a call without a marker.
    probe    text that the template of such a model writes for a call.
    grammar  describes constrained calls to llguidance.
    id_chars length of the ids of calls without the prefix "call_"; 0: the ids have the prefix.
    parser   makes the parser of an answer, as `open`.
    write    writes the grammar of an answer, as `written`.
    """

    name: str
    starts: tuple[str, ...]
    probe: str
    read: Callable[[Reader, "Calls", str], Steps[None]] | None = None
    grammar: CallGrammar | None = None
    markers: tuple[str, ...] = ()
    bare: str = ""
    id_chars: int = 0
    parser: Callable[[Mapping[str, Any], Mapping[int, str] | None], CallParser] | None = None
    write: Callable[[ToolGrammar, Mapping[str, int]], WrittenGrammar] | None = None

    def open(
        self, parameters: Mapping[str, Any], marker_ids: Mapping[int, str] | None = None
    ) -> CallParser:
        """Return the parser of one answer. The parameters are as in ToolCallParser."""
        if self.parser is not None:
            return self.parser(parameters, marker_ids)
        return ToolCallParser(self, parameters, marker_ids)

    def written(self, request: ToolGrammar, token_ids: Mapping[str, int]) -> WrittenGrammar:
        """Return the grammar of an answer. token_ids: as in GrammarWriter."""
        if self.write is not None:
            return self.write(request, token_ids)
        assert self.grammar is not None, f"the format {self.name} has no grammar: this is a bug"
        return write_grammar(self.grammar, self.bare, request, token_ids)


class Calls:
    """The calls of one answer, as the reader of a format reports them.

    Each report commits the text that the reader has read.

    parameters  the JSON schema of the arguments of each tool, by its name.
    deltas      reports that `ToolCallParser.take` has not returned yet.
    count       number of calls that have begun.
    is_open     the last call has not ended.
    is_last     no content has followed the last call.
    reader      the text of the open call.
    """

    def __init__(self, parameters: Mapping[str, Any], id_chars: int) -> None:
        self.parameters = parameters
        self.deltas: list[ToolCallDelta] = []
        self.count = 0
        self.is_open = False
        self.is_last = False
        self.reader = Reader("")
        self._id_chars = id_chars
        self._has_arguments = False

    def start(self, name: str) -> None:
        """Begin a call. Raises NotACall for an empty name.

        A call without a marker must name a known tool, because its text may be an ordinary answer.
        Raises NotACall for another name.
        """
        if not name or (self.reader.is_bare and name not in self.parameters):
            raise NotACall
        self.deltas.append(ToolCallDelta(self.count, "", _call_id(self._id_chars), name))
        self.count += 1
        self.is_open, self.is_last, self._has_arguments = True, True, False
        self.reader.commit()

    def arguments(self, piece: str) -> None:
        """Add a piece of the JSON text of the arguments."""
        if piece:
            self._has_arguments = True
            self.deltas.append(ToolCallDelta(self.count - 1, piece))
        self.reader.commit()

    def end(self) -> None:
        """Complete the call. A call without arguments gets {}."""
        if not self._has_arguments:
            self.arguments("{}")
        self.is_open = False
        self.reader.commit()


class ToolCallParser:
    """Splits the text of one answer into content and tool calls.

        parser = ToolCallParser(HERMES, {"now": {}})
        parser.feed('Let me see.\n<tool_call>{"name": "now", "arguments": {}}</tool_call>')
        parser.finish()
        parser.take()      # "Let me see.", [ToolCallDelta(0, "", "call_...", "now"), ...]

    marker_ids  the special tokens that are markers, with their texts.
    failures    number of markers without a call, and of calls that began and were not completed.
    """

    has_sections = in_header = in_reasoning = False

    def __init__(
        self,
        format: Format,
        parameters: Mapping[str, Any],
        marker_ids: Mapping[int, str] | None = None,
    ) -> None:
        assert format.read is not None, f"{format.name} has a parser of its own: this is a bug"
        self.marker_ids = marker_ids or {}
        self.failures = 0
        self._read = format.read
        self._format = format
        special = self.marker_ids.values()
        # A start that is a special token counts only as this token, and not as text.
        self._starts = tuple(start for start in format.starts if start not in special)
        self._calls = Calls(parameters, format.id_chars)
        self._content: list[str] = []
        self._withheld = ""
        self._may_be_bare = bool(format.bare)
        self._steps: Steps[None] | None = None

    def feed(self, text: str, is_marker: bool = False) -> None:
        """Add text. is_marker: it is the whole text of a special token of `marker_ids`."""
        if is_marker and text in self._format.starts:
            self._end_call()  # A start does not occur inside of a call.
            content = self._withheld.rstrip()
            space, self._withheld = self._withheld[len(content) :], ""
            self._emit(content)
            self._open(Reader(space + text), text, "")
            return
        for begin in range(0, len(text), _PIECE_CHARS):
            self._feed(text[begin : begin + _PIECE_CHARS])

    def begin(self) -> None:
        """Begin the answer. The format does not depend on the end of the prompt."""

    def finish(self) -> None:
        """End the answer: withheld text becomes content."""
        self._end_call()
        if not (self._calls.is_last and self._withheld.isspace()):
            self._emit(self._withheld)
        self._withheld = ""

    def take(self) -> tuple[str, list[ToolCallDelta]]:
        """Return the content and the deltas of calls since the last call of this method."""
        if not self._content and not self._calls.deltas:
            return "", []
        content, deltas = "".join(self._content), self._calls.deltas
        self._content, self._calls.deltas = [], []
        return content, joined(deltas) if len(deltas) > 1 else deltas

    def _feed(self, text: str) -> None:
        rest = text
        while rest:
            if self._steps is None:
                rest = self._find_start(rest)
            else:
                self._calls.reader.feed(rest)
                rest = self._advance(self._steps)

    def _end_call(self) -> None:
        """End the open call, if there is one, as if the answer ended here."""
        while self._steps is not None:
            self._calls.reader.ended = True
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
                space = text[: len(text) - len(answer)]
                return self._open(Reader(space, is_bare=True), "", answer)
        begins = [(at, -len(s), s) for s in self._starts if (at := text.find(s)) >= 0]
        if begins:
            at, _, start = min(begins)
            content = text[:at].rstrip()
            self._emit(content)
            prefix = text[len(content) : at + len(start)]
            return self._open(Reader(prefix), start, text[at + len(start) :])
        partial = max((partial_match(start, text) for start in self._starts), default=0)
        certain = text[: len(text) - partial]
        content = certain.rstrip()
        if len(certain) - len(content) > _MAX_SPACE:
            content = certain
        self._emit(content)
        self._withheld = text[len(content) :]
        return ""

    def _open(self, reader: Reader, start: str, rest: str) -> str:
        """Begin to read calls. Returns the part of `rest` that follows them."""
        self._may_be_bare = False
        self._calls.reader = reader
        self._steps = self._read(reader, self._calls, start)
        reader.feed(rest)
        return self._advance(self._steps)

    def _advance(self, steps: Steps[None]) -> str:
        """Read on. Returns the text that belongs to no call; "" if the call needs more text."""
        try:
            next(steps)
        except StopIteration:
            is_call = True
        except NotACall:
            is_call = False
        else:
            return ""
        self._steps = None
        reader = self._calls.reader
        held, rest = reader.split()
        if not is_call:
            self.failures += self._calls.is_open or not reader.is_bare
            # At least the marker becomes content, so that the search cannot find it again.
            certain = len(reader.prefix) if len(held) <= _SEARCHED_CHARS else len(held)
            self._emit(held[:certain])
            held = held[certain:]
        self._calls.is_open = False
        return held + rest

    def _emit(self, content: str) -> None:
        if content:
            self._content.append(content)
            self._calls.is_last = False


def joined(deltas: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """Join the pieces of arguments that follow each other. The beginnings of calls stay apart."""
    joined: list[ToolCallDelta] = []
    for is_start, group in itertools.groupby(deltas, lambda delta: bool(delta.id)):
        pieces = list(group)
        if is_start:
            joined += pieces
        else:
            arguments = "".join(piece.arguments for piece in pieces)
            joined.append(ToolCallDelta(pieces[0].index, arguments))
    return joined


def _call_id(chars: int) -> str:
    text = "".join(secrets.choice(_ID_CHARS) for _ in range(chars or 24))
    return text if chars else "call_" + text
