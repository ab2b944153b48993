"""Makes a chat from a request of OpenAI's Responses API.

The server stores nothing, so each request has its whole history. A chat has one message for each
turn of the assistant, with reasoning, text and tool calls. In the Responses API these are separate
items, so consecutive items of the assistant become one message.
"""

from typing import Any

from minisgl.core import ModelFacts, Unsupported
from minisgl.server.apis.translation import Translation, template_options
from minisgl.server.decode import reject
from minisgl.server.protocol import requests
from minisgl.server.protocol import responses_api as api

_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_DEVELOPER = ("system", "developer")


def translate(body: api.ResponsesBody, facts: ModelFacts) -> Translation:
    """The chat of this body. Raises InvalidRequest or Unsupported with the path in the body."""
    effort = body.reasoning and body.reasoning.effort
    options, ignored = template_options(facts, reasoning_effort=effort)
    chat = requests.ChatBody(
        model=body.model,
        messages=_messages(body),
        chat_template_kwargs=options,
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        **_tool_parameters(body),
        **_format_parameters(body.text),
    )
    ignored += tuple("tool" for tool in body.tools if tool.type != "function")
    return Translation(chat, "input", ignored, _repeated(body))


def _messages(body: api.ResponsesBody) -> list[requests.Message]:
    """The messages of a chat. The developer's texts at the beginning become one message, because
    many chat templates accept one system message only.
    """
    messages: list[requests.Message] = []
    if body.instructions:
        messages.append(requests.Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*messages, requests.Message(role="user", content=body.input)]
    for index, item in enumerate(body.input):
        path = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(messages, item, path)
            case "function_call":
                message = _assistant(messages)
                message.tool_calls = [*(message.tool_calls or ()), _call(item, path)]
            case "function_call_output":
                content = _text(item.output, f"{path}.output")
                messages.append(
                    requests.Message(role="tool", content=content, tool_call_id=item.call_id)
                )
            case "reasoning":
                message = _assistant(messages)
                text = _text(item.content, f"{path}.content")
                text = text or _text(item.summary, f"{path}.summary")
                message.reasoning_content = (message.reasoning_content or "") + text
            case _:
                raise Unsupported(
                    f"{path}: items of type {item.type[:64]!r} are not supported", path
                )
    return messages


def _add_message(messages: list[requests.Message], item: api.ResponsesItem, path: str) -> None:
    if item.role is None or item.role == "tool":
        raise reject(f"{path}.role", "must be one of system, developer, user, assistant")
    if item.content is None:
        raise reject(f"{path}.content", "is required")
    content = _text(item.content, f"{path}.content")
    if item.role == "assistant":
        message = _assistant(messages)
        message.content = f"{message.content}\n{content}" if message.content else content
    elif item.role in _DEVELOPER and len(messages) == 1 and messages[0].role == "system":
        messages[0].content = f"{messages[0].content}\n\n{content}"
    else:
        role = "system" if item.role in _DEVELOPER else item.role
        messages.append(requests.Message(role=role, content=content))


def _assistant(messages: list[requests.Message]) -> requests.Message:
    """The last message if it is of the assistant, or a new one."""
    if not messages or messages[-1].role != "assistant":
        messages.append(requests.Message(role="assistant", content=""))
    return messages[-1]


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
    """The parameters of a chat about tools: those of type function, and the choice of them."""
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
