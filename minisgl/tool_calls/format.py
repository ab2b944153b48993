"""`Format`: the form in which the models of a family write tool calls in their text."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from minisgl.tool_calls.grammar import GrammarWriter, ToolGrammar, WrittenGrammar
from minisgl.tool_calls.parser import Calls, ToolCallParser
from minisgl.tool_calls.reader import Reader, Steps
from minisgl.tool_calls.schema import ParameterTypes


class Format(NamedTuple):
    """A format whose answers are text with calls in it.

    probe      text that the template of such a model writes for a call.
    starts     markers that begin a call or a list of calls, at any place of the answer. The
               grammar of an answer uses the first of them only, and none if the format has `bare`.
    markers    all markers that may be special tokens, the starts included. The parser receives the
               text of these tokens also with skip_special_tokens.
    bare       characters; an answer that begins with one of them may be a call without a marker.
    read       reads the calls after this start. At the beginning of an answer the start may be "".
               When `read` returns or raises NotACall, the text that it has read since its last
               report to Calls is content.
    call       writes the expression of a call to the tool with this name and this schema of its
               arguments, without the texts around it.
    opening    text between a start and the first call of a list; "": the calls are no list.
    separator  text between two calls. If they are no list, it stands between `end` and the start.
    end        text after each call, or after the list of calls.
    id_chars   length of the ids of calls without the prefix "call_"; 0: the ids have the prefix.
    """

    name: str
    probe: str
    starts: tuple[str, ...]
    markers: tuple[str, ...]
    read: Callable[[Reader, Calls, str], Steps[None]]
    call: Callable[[GrammarWriter, str, Mapping[str, Any]], str]
    bare: str = ""
    opening: str = ""
    separator: str = ""
    end: str = ""
    id_chars: int = 0

    def open(self, parameters: ParameterTypes, marker_ids: Mapping[int, str]) -> ToolCallParser:
        """Return the parser of one answer.

        parameters: as in Calls. marker_ids: the special tokens that are markers, with their texts.
        """
        return ToolCallParser(self, parameters, marker_ids)

    def write(self, request: ToolGrammar, token_ids: Mapping[str, int]) -> WrittenGrammar:
        """Return the grammar of an answer. token_ids: as in GrammarWriter."""
        writer = GrammarWriter(token_ids, dict(request.tools))
        call = writer.rule(
            " | ".join(f"( {self.call(writer, name, schema)} )" for name, schema in request.tools)
        )
        marker = "" if self.bare else self.starts[0]
        start, end = writer.text(marker), writer.text(self.end)
        separator = writer.text(self.separator)
        if self.opening:
            after_start = f"{writer.text(self.opening)} {call}"
            further, last = f"{separator} {call}", end
        else:
            after_start, further, last = f"{call} {end}", f"{separator} {start} {call} {end}", ""
        repeated = f"( {further} )*" if request.parallel else ""
        after_start = f"{after_start} {repeated} {last}"
        trigger = -1
        if request.must_call:
            body = f"{start} {after_start}"
        elif request.answer is not None:
            body = f"{start} {after_start} | {writer.schema(request.answer)}"
        elif marker in token_ids:
            trigger, body = token_ids[marker], after_start
        elif self.bare:
            body = f"{start} {after_start} | TEXT?"
            writer.rules.append(f"TEXT: /\\s*[^\\{self.bare}\\s](?s:.*)/")
        else:
            before = writer.rule(f"/(?s:.*)/ {start}", "[lazy]")
            body = f"{before} {after_start} | /(?s:.*)/"
        return writer.written(body, trigger)
