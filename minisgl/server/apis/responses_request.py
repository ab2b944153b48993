"""Makes a chat from a request of OpenAI's Responses API.

The server stores nothing, so each request has its whole history. A chat has one message for each
turn of the assistant, with reasoning, text and tool calls. In the Responses API these are separate
items, so consecutive items of the assistant become one message.
"""

from dataclasses import dataclass, field
from typing import Any

from minisgl.core import ModelFacts, Unsupported
from minisgl.server.apis.translation import Translation
from minisgl.server.decode import reject
from minisgl.server.protocol import requests
from minisgl.server.protocol import responses_api as api

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def translate(body: api.ResponsesBody, facts: ModelFacts) -> Translation:
    """The chat of this body. Raises InvalidRequest or Unsupported with the path in the body."""
    chat = requests.ChatBody(
        model=body.model,
        messages=_messages(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        priority=body.priority,
        **_tool_parameters(body),
        **_format_parameters(body.text),
    )
    ignored = tuple("tool" for tool in body.tools if tool.type != "function")
    return Translation(chat, "input", "max_output_tokens", ignored, _repeated(body))


@dataclass(eq=False, slots=True)
class _Turn:
    """Consecutive items that become one message. Their texts are joined once, at the end."""

    role: requests.Role
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[requests.ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> requests.Message:
        return requests.Message(
            role=self.role,
            content=("\n\n" if self.role == "system" else "\n").join(self.texts),
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
            tool_call_id=self.call_id,
        )


def _messages(body: api.ResponsesBody) -> list[requests.Message]:
    """The messages of a chat."""
    turns = [_Turn("system", [body.instructions])] if body.instructions else []
    if isinstance(body.input, str):
        turns.append(_Turn("user", [body.input]))
        return [turn.message() for turn in turns]
    for index, item in enumerate(body.input):
        path = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(turns, item, path)
            case "function_call":
                _turn(turns, "assistant").calls.append(_call(item, path))
            case "function_call_output":
                content = _text(item.output, f"{path}.output")
                turns.append(_Turn("tool", [content], call_id=item.call_id))
            case "reasoning":
                text = _text(item.content, f"{path}.content")
                text = text or _text(item.summary, f"{path}.summary")
                _turn(turns, "assistant").reasoning.append(text)
            case _:
                raise Unsupported(
                    f"{path}: items of type {item.type[:64]!r} are not supported", path
                )
    return [turn.message() for turn in turns]


def _add_message(turns: list[_Turn], item: api.ResponsesItem, path: str) -> None:
    if item.role is None or item.role == "tool":
        raise reject(f"{path}.role", "must be one of system, developer, user, assistant")
    if item.content is None:
        raise reject(f"{path}.content", "is required")
    role: requests.Role = "system" if item.role == "developer" else item.role
    _turn(turns, role).texts.append(_text(item.content, f"{path}.content"))


def _turn(turns: list[_Turn], role: requests.Role) -> _Turn:
    """The turn to which an item of this role belongs.

    Consecutive items of the assistant are one turn. Consecutive system items at the beginning are
    one turn too, because many chat templates accept only one system message.
    """
    joins = role == "assistant" or (role == "system" and len(turns) == 1)
    if not (joins and turns and turns[-1].role == role):
        turns.append(_Turn(role))
    return turns[-1]


def _call(item: api.ResponsesItem, path: str) -> requests.ToolCall:
    if not item.name:
        raise reject(f"{path}.name", "is required")
    function = requests.FunctionCall(name=item.name, arguments=item.arguments)
    return requests.ToolCall(id=item.call_id, function=function)


def _text(content: api.Content, path: str) -> str:
    """The text of a content. Raises Unsupported for a part that is not text."""
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content):
        if part.type not in _TEXT_PARTS:
            text = f"{path}[{index}]: only parts with text are supported, not {part.type[:64]!r}"
            raise Unsupported(text, f"{path}[{index}]")
    return "\n".join([part.text for part in content])


def _tool_parameters(body: api.ResponsesBody) -> dict[str, Any]:
    """Return the tool parameters of a chat: the tools of type function, and the tool choice."""
    tools = []
    for index, tool in enumerate(body.tools):
        if tool.type != "function":
            continue
        if not tool.name:
            raise reject(f"tools[{index}].name", "is required")
        function = requests.FunctionTool(
            name=tool.name,
            description=tool.description,
            parameters=tool.parameters,
            strict=tool.strict,
        )
        tools.append(requests.Tool(type="function", function=function))
    return {
        "tools": tools,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
    }


def _tool_choice(given: str | api.ResponsesToolChoice) -> str | requests.ToolChoice:
    if isinstance(given, str):
        return given
    if given.type == "function":
        name = requests.FunctionName(name=given.name)
        return requests.ToolChoice(type="function", function=name)
    if given.type != "allowed_tools":
        raise Unsupported("tool_choice.type must be function or allowed_tools", "tool_choice.type")
    tools = [
        requests.ToolName(type="function", function=requests.FunctionName(name=tool.name))
        for tool in given.tools
        if tool.type == "function"
    ]
    allowed = requests.AllowedTools(mode=given.mode, tools=tools)
    return requests.ToolChoice(type="allowed_tools", allowed_tools=allowed)


def _format_parameters(text: api.TextConfig | None) -> dict[str, Any]:
    """The parameter response_format of a chat."""
    if text is None or text.format is None:
        return {}
    given = text.format
    schema = None
    if given.schema is not None:
        schema = requests.NamedSchema(name=given.name, schema=given.schema, strict=given.strict)
    return {"response_format": requests.ResponseFormat(type=given.type, json_schema=schema)}


def _repeated(body: api.ResponsesBody) -> dict[str, Any]:
    """The parameters that an answer repeats."""
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning": body.reasoning or api.ResponsesReasoning(),
        "temperature": body.temperature,
        "text": body.text or api.TextConfig(format=api.TextFormat(type="text")),
        "tool_choice": body.tool_choice,
        "tools": [tool for tool in body.tools if tool.type == "function"],
        "top_p": body.top_p,
    }
