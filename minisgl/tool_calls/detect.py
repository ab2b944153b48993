"""Finds the tool call format of a model by rendering a call with its chat template."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import msgspec

from minisgl.core import ModelFacts
from minisgl.message.messages import ToolCallDelta
from minisgl.tokenizer.renderer import TemplateError
from minisgl.tokenizer.tokenizer import TextTokenizer
from minisgl.tool_calls.format import Format
from minisgl.tool_calls.formats import FORMATS
from minisgl.tool_calls.formats.message_format import MessageFormat
from minisgl.tool_calls.schema import parameter_types

# Renders messages with template options, as TextTokenizer.render_chat.
Render = Callable[[list[dict[str, Any]], dict[str, Any]], str]

_OPEN_TAG = re.compile(r"<[^<>]*\Z")
_EMPTY_THINKING = re.compile(r"(?:<think>)?\s*</think>")
_NAME, _ARGUMENTS = "probe_tool", {"probe_key": "probe value"}
_PARAMETERS = {
    "type": "object",
    "properties": {"probe_key": {"type": "string", "description": "probe"}},
    "required": ["probe_key"],
}
_FUNCTION = {"name": _NAME, "description": "probe", "parameters": _PARAMETERS}
_TOOLS = [{"type": "function", "function": _FUNCTION}]
_QUESTION = {"role": "user", "content": "probe question"}
_CALLED = {"name": _NAME, "arguments": _ARGUMENTS}
_CALLS = [{"id": "probe0001", "type": "function", "function": _CALLED}]
_CALL = {"role": "assistant", "content": "", "tool_calls": _CALLS}


def detect_format(tokenizer: TextTokenizer, given: str) -> str:
    """Return the tool_format of ModelFacts for a model. given: --tool-format.

    --tool-format has no effect on a model whose template does not render tools.
    """
    found = detect(tokenizer.render_chat)
    format = FORMATS.get(found)
    if isinstance(format, MessageFormat):
        ids = tokenizer.vocabulary.special_ids(format.markers)
        if set(ids.values()) != set(format.markers):  # the parser finds messages by these tokens
            found = ModelFacts.UNKNOWN_TOOL_FORMAT
    return found if given == "auto" or found == ModelFacts.NO_TOOLS else given


def detect(render: Render) -> str:
    """Return the name of the format whose parser reads the rendered call back.

    Returns ModelFacts.NO_TOOLS if the template does not render tools, and
    ModelFacts.UNKNOWN_TOOL_FORMAT if it renders them and no parser reads the call.
    """
    try:
        prompt = render([_QUESTION], {"tools": _TOOLS})
    except TemplateError:
        return ModelFacts.NO_TOOLS
    if _NAME not in prompt:
        return ModelFacts.NO_TOOLS
    try:
        chat = render([_QUESTION, _CALL], {"tools": _TOOLS, "add_generation_prompt": False})
    except TemplateError:
        return ModelFacts.UNKNOWN_TOOL_FORMAT
    answer = answer_in(chat, prompt)
    found = (format for format in FORMATS.values() if format.probe in answer)
    return next((f.name for f in found if _reads(f, answer)), ModelFacts.UNKNOWN_TOOL_FORMAT)


def answer_in(chat: str, prompt: str) -> str:
    """Return the part of a rendered chat that the model would write after this prompt.

    The prompt may end with a tag, such as <think>, that the chat does not repeat. The first
    characters of this tag may equal those of a call.
    """
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, chat, strict=False))
    prefix = _OPEN_TAG.sub("", "".join(char for char, _ in pairs))
    return chat[len(prefix) :]


def _reads(format: Format | MessageFormat, answer: str) -> bool:
    """True if the parser of this format reads the probe's call to its end, and no text before."""
    parser = format.open(parameter_types({_NAME: _PARAMETERS}), {})
    content = ""
    deltas: list[ToolCallDelta] = []
    markers = "|".join(map(re.escape, format.markers))
    for piece in re.split(f"({markers})", answer):
        parser.feed(piece, is_marker=piece in format.markers)
        text, new = parser.take()
        deltas += new
        content += "" if deltas else text
    names = [delta.name for delta in deltas if delta.name]
    try:
        arguments = msgspec.json.decode("".join(delta.arguments for delta in deltas))
    except msgspec.DecodeError:
        return False
    is_only = not _EMPTY_THINKING.sub("", content).strip()
    return is_only and names == [_NAME] and arguments == _ARGUMENTS
