"""Harmony, the format of gpt-oss: an answer is a sequence of messages, each with a header.

    <|channel|>analysis<|message|>Let me look.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>

The channel analysis is reasoning, and a recipient functions.f makes a message a call. The channels
final and commentary are content. The markers are special tokens; text that spells one is text. The
model ends its turn with <|return|> or <|call|>, which are end tokens of the model.
"""

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from minisgl.tool_calls.grammar import GrammarWriter, ToolGrammar, WrittenGrammar
from minisgl.tool_calls.parser import Calls
from minisgl.tool_calls.schema import ParameterTypes

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_END, _RETURN, _CALL = "<|end|>", "<|return|>", "<|call|>"
MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _RETURN, _CALL)
_MARKER = re.compile("|".join(map(re.escape, MARKERS)))
_NAMESPACE = "functions."
_RECIPIENT = re.compile(r"(?:\A|\s)to=(\S+)")
_CHANNEL_NAME = re.compile(re.escape(_CHANNEL) + r"\s*(\w*)")
# The prompt ends with the role of the first message. The answer may go on with a recipient.
_MAY_BE_FIRST = re.compile(r"\s*(?:t|to|to=\S*\s*)?")
_MAX_HEADER_CHARS = 1024

Section = Literal["header", "reasoning", "content", "call"]


class HarmonyParser:
    """Splits an answer into reasoning, content and tool calls. Implements CallParser.

    The caller passes the last tokens of the prompt to `feed` and then calls `begin`. These tokens
    tell in which section the answer begins. Usually it begins in a header, after the role. A header
    that is cut off by the end of the answer is left out. Text that begins an answer and is no
    header is content. Without tools, messages to functions are content.

    failures  number of calls whose arguments are no complete JSON.
    """

    has_sections = True

    def __init__(self, parameters: ParameterTypes, marker_ids: Mapping[int, str]) -> None:
        self.marker_ids = marker_ids
        self.failures = 0
        self._calls = Calls(parameters)
        self.take = self._calls.take
        self._section: Section = "header"
        self._header = ""
        self._arguments: list[str] = []

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
        elif text == _MESSAGE and self.in_header:
            self._open_message()
        elif self.in_header and text in (_CHANNEL, _CONSTRAIN):
            self._header += text
        else:
            self._end_call()
            self._section = "header" if text in (_START, _CHANNEL) else "content"
            self._header = text

    def begin(self) -> None:
        """Begin the answer, after the text of the prompt."""
        self.take()
        if not self.in_header:
            return
        markers = _MARKER.findall(self._header)
        if markers[-1:] == [_START]:
            self._header = ""  # behind the role, so that an answer without a header is content
        elif self._header and not markers:
            self._section = "content"  # the prompt ends in a message that began long before

    def finish(self) -> None:
        """End the answer."""
        self._end_call()
        if self.in_header and not _MARKER.search(self._header) and "to=" not in self._header:
            self._calls.text(self._header)
        self._section = "content"

    def _add(self, text: str) -> None:
        if self.in_header:
            self._header += text
            is_plain = not _MARKER.search(self._header)
            if (is_plain and not _MAY_BE_FIRST.fullmatch(self._header)) or (
                len(self._header) > _MAX_HEADER_CHARS
            ):
                self._section = "content"
                self._calls.text(self._header)
        elif self._section == "call":
            self._arguments.append(text)
            self._calls.arguments(text)
        else:
            self._calls.text(text)

    def _open_message(self) -> None:
        """Find the kind of a message from its header."""
        found = _RECIPIENT.search(_MARKER.sub(" ", self._header))
        recipient, tools = found[1] if found else "", self._calls.parameters
        if recipient.startswith(_NAMESPACE) or recipient in tools:
            self._section = "content"
            if tools:
                self._section, self._arguments = "call", []
                self._calls.start(recipient.removeprefix(_NAMESPACE) or recipient)
        else:
            channel = _CHANNEL_NAME.findall(self._header)[-1:]
            # A message to a tool of the model's own, such as python, is a part of its reasoning.
            is_thought = channel == ["analysis"] or (recipient and channel != ["final"])
            self._section = "reasoning" if is_thought else "content"

    def _end_call(self) -> None:
        if self._section != "call":
            return
        try:
            msgspec.json.decode("".join(self._arguments))
        except (msgspec.DecodeError, RecursionError):
            self.failures += 1
        self._section = "content"


class Harmony:
    """The format, with the methods of Format."""

    name = "harmony"
    probe = f"{_CHANNEL}commentary"
    markers = MARKERS

    def open(self, parameters: ParameterTypes, marker_ids: Mapping[int, str]) -> HarmonyParser:
        """As Format.open."""
        return HarmonyParser(parameters, marker_ids)

    def write(self, request: ToolGrammar, token_ids: Mapping[str, int]) -> WrittenGrammar:
        """As Format.write: reasoning and comments, then one call or the final message.

        The model ends its turn after a call, so that there is never a second one. Reasoning and
        comments are free.
        """
        writer = GrammarWriter(token_ids)
        channel, message = writer.text(_CHANNEL), writer.text(_MESSAGE)
        next_message = f'{writer.text(_END)} {writer.text(_START)} "assistant"'
        free = writer.rule(
            f'{channel} ( "analysis" | "commentary" ) {message} TEXT? {next_message}'
        )
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


HARMONY = Harmony()
