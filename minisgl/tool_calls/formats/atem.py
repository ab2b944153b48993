"""ATEM, the format of Muse Glimmer: an answer is a sequence of messages, each with a recipient.

     to=self<|message|>Let me look.<|eom|><|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="k">v</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eot|>

A message to self is reasoning, one to user is content, and one to a tool is a list of calls. The
model ends its turn with <|eot|>, which is an end token of the model.
"""

from collections.abc import Mapping

from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats.invoke import Invocations
from minisgl.tool_calls.formats.message_format import (
    MESSAGE,
    RECIPIENT,
    START,
    MessageFormat,
    MessageParser,
    Section,
)
from minisgl.tool_calls.grammar import GrammarWriter, ToolGrammar, WrittenGrammar
from minisgl.tool_calls.parser import ToolCallParser
from minisgl.tool_calls.schema import ParameterTypes

_EOM, _EOT = "<|eom|>", "<|eot|>"
MARKERS = (START, MESSAGE, _EOM, _EOT)
_CALLS_START, _CALLS_END = "<atem:function_calls>", "</atem:function_calls>"
_INVOCATIONS = Invocations(_CALLS_END, "atem:")
# The format of the text of a message with calls.
_CALLS = Format(
    name="atem",
    probe=_CALLS_START,
    starts=(_CALLS_START,),
    markers=(),
    read=_INVOCATIONS.read,
    call=_INVOCATIONS.write_call,
)


class AtemParser(MessageParser):
    """The parser of one answer. Text of a message to a tool that is no call is content."""

    def __init__(self, parameters: ParameterTypes, marker_ids: Mapping[int, str]) -> None:
        self._text = ToolCallParser(_CALLS, parameters, {})
        super().__init__(self._text.calls, marker_ids)

    def open_message(self, header: str) -> Section:
        found = RECIPIENT.search(self._marker.sub(" ", header))
        recipient = found[1] if found else "user"
        if recipient == "self":
            return "reasoning"
        return "call" if recipient != "user" and self._calls.parameters else "content"

    def call_text(self, text: str) -> None:
        self._text.feed(text)

    def end_call(self) -> None:
        self._text.finish()
        self.failures += self._text.failures
        self._text.failures = 0


def _write(request: ToolGrammar, token_ids: Mapping[str, int]) -> WrittenGrammar:
    """As Format.write: free reasoning, then messages with one call each, or one to the user."""
    writer = GrammarWriter(token_ids, dict(request.tools))
    message = writer.text(MESSAGE)
    next_message = f'{writer.text(_EOM)} {writer.text(START)} "assistant"'
    thoughts = f'( " to=self" {message} TEXT? {next_message} )*'
    last = []
    if request.tools:
        calls = [_write_call(writer, name, schema) for name, schema in request.tools]
        call = writer.rule(" | ".join(f"( {one} )" for one in calls))
        further = f"( {next_message} {thoughts} {call} )*" if request.parallel else ""
        last.append(f"{call} {further}")
    if not request.must_call:
        answer = "TEXT?" if request.answer is None else writer.schema(request.answer)
        last.append(f'" to=user" {message} {answer}')
    writer.rules.append("TEXT: /(?s:.+)/")
    return writer.written(f"{thoughts} ( {' | '.join(f'( {one} )' for one in last)} )")


def _write_call(writer: GrammarWriter, name: str, schema: Mapping[str, object]) -> str:
    header, message = writer.text(f" to={name}"), writer.text(MESSAGE)
    start, end = writer.text(f"{_CALLS_START}\n"), writer.text(f"\n{_CALLS_END}")
    return " ".join([header, message, start, _CALLS.call(writer, name, schema), end])


ATEM = MessageFormat("atem", _CALLS_START, MARKERS, AtemParser, _write)
