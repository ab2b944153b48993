"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each with a header.

    <|channel|>analysis<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

The channel analysis is reasoning, and a recipient functions.f makes a message a call. The channels
final and commentary are content. The markers are special tokens; text that spells one is text. The
model ends its turn with <|return|> or <|call|>, which are end tokens of the model.
"""

import re
from collections.abc import Mapping

import msgspec

from minisgl.tool_calls.formats.message_format import (
    MESSAGE,
    RECIPIENT,
    START,
    MessageFormat,
    MessageParser,
    Section,
)
from minisgl.tool_calls.grammar import GrammarWriter, ToolGrammar, WrittenGrammar
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.schema import ParameterTypes

_CHANNEL, _CONSTRAIN = "<|channel|>", "<|constrain|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (START, _CHANNEL, _CONSTRAIN, MESSAGE, _END, _RETURN, _CALL)
_NAMESPACE = "functions."
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w*)")


class HarmonyParser(MessageParser):
    """The parser of one answer."""

    openers = (START, _CHANNEL)
    in_headers = (_CHANNEL, _CONSTRAIN)

    def __init__(self, parameters: ParameterTypes, marker_ids: Mapping[int, str]) -> None:
        super().__init__(Calls(parameters), marker_ids)
        self._arguments: list[str] = []

    def open_message(self, header: str) -> Section:
        found = RECIPIENT.search(self._marker.sub(" ", header))
        recipient, tools = found[1] if found else "", self._calls.parameters
        if recipient.startswith(_NAMESPACE) or recipient in tools:
            if not tools:
                return "content"
            self._arguments = []
            self._calls.start(recipient.removeprefix(_NAMESPACE) or recipient)
            return "call"
        channel = _CHANNEL_NAME.findall(header)[-1:]
        # A message to a tool of the model's own, such as python, is a part of its reasoning.
        is_thought = channel == ["analysis"] or (recipient and channel != ["final"])
        return "reasoning" if is_thought else "content"

    def call_text(self, text: str) -> None:
        self._arguments.append(text)
        self._calls.arguments(text)

    def end_call(self) -> None:
        try:
            msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            self.failures += 1


def _write(request: ToolGrammar, token_ids: Mapping[str, int]) -> WrittenGrammar:
    """As Format.write: reasoning and comments, then one call or the final message.

    The model ends its turn after a call, so that there is never a second one. Reasoning and
    comments are free.
    """
    writer = GrammarWriter(token_ids)
    channel, message = writer.text(_CHANNEL), writer.text(MESSAGE)
    next_message = f'{writer.text(_END)} {writer.text(START)} "assistant"'
    free = writer.rule(f'{channel} ( "analysis" | "commentary" ) {message} TEXT? {next_message}')
    last = [
        f"{channel} {writer.text(f'commentary to={_NAMESPACE}{name} ')} "
        f'{writer.text(_CONSTRAIN)} "json" {message} {writer.schema(schema)}'
        for name, schema in request.tools
    ]
    if not request.must_call:
        answer = "TEXT?" if request.answer is None else writer.schema(request.answer)
        last.append(f'{channel} "final" {message} {answer}')
    writer.rules.append("TEXT: /(?s:.+)/")
    return writer.written(f"{free}* ( {' | '.join(f'( {one} )' for one in last)} )")


HARMONY = MessageFormat("harmony", f"{_CHANNEL}commentary", MARKERS, HarmonyParser, _write)
