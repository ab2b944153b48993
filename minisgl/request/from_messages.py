"""Makes a chat from a request of Anthropic's Messages API."""

from collections.abc import Mapping, Sequence

from minisgl.core import Unsupported
from minisgl.protocol import messages_api as api
from minisgl.protocol import requests
from minisgl.protocol.content import ImagePart, ImageUrl, PlacedImage
from minisgl.request.decode import reject
from minisgl.request.images import file_refused
from minisgl.request.paths import Paths
from minisgl.request.translation import (
    Breakpoints,
    Translation,
    Turn,
    chat_tool,
    function_paths,
    shared_parameters,
)

# Claude Code sends its version and a number that changes with each request in a system block of
# its own. The block would change the beginning of each prompt, so that no prefix could be cached.
_BILLING = "x-anthropic-billing-header:"
_CUSTOM = (None, "custom")  # the types of a tool whose schema is in the request
# Paths in a chat, each with its path in a body of Messages; see Paths.
_PATHS = {
    "reasoning_effort": "output_config.effort",
    "response_format.json_schema": "output_config.format",
    "tool_choice.function": "tool_choice",
}
_CHOICES: Mapping[str, requests.ToolMode] = {"auto": "auto", "any": "required", "none": "none"}
# The types of blocks in the messages of each role. The result of a tool becomes a message.
_KINDS: Mapping[requests.Role, Sequence[str]] = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
    "tool": ("text", "image"),
}


def translate(body: api.CountTokensBody) -> Translation:
    """The chat of this body. Raises InvalidRequest or Unsupported with the path in the body."""
    messages = _messages(body)
    parameters = shared_parameters(body)
    if isinstance(body, api.MessagesBody):
        parameters |= {"max_tokens": body.max_tokens, "stop": body.stop_sequences}
    config = body.output_config or api.OutputConfig()
    if config.format is not None:
        schema = requests.NamedSchema(schema=config.format.schema)
        form = requests.ResponseFormat(type="json_schema", json_schema=schema)
        parameters["response_format"] = form
    choice = body.tool_choice or api.MessagesToolChoice(type="auto")
    named = requests.ToolChoice(type="function", function=requests.FunctionName(name=choice.name))
    chat = requests.ChatBody(
        **parameters,
        messages=messages,
        reasoning_effort=config.effort,
        thinking=body.thinking,
        continue_final_message=messages[-1].role == "assistant" and bool(messages[-1].content),
        tools=[chat_tool(tool) for tool in body.tools if tool.type in _CUSTOM],
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        tool_choice=_CHOICES.get(choice.type, named),
    )
    ignored = tuple("tool" for tool in body.tools if tool.type not in _CUSTOM)
    paths = {
        **_PATHS,
        **function_paths("tools", "tools", [tool.type in _CUSTOM for tool in body.tools]),
        "continue_final_message": f"messages[{len(body.messages) - 1}]",
    }
    return Translation(
        chat,
        Paths(paths),
        shrinks_max_tokens=True,
        ignored=ignored,
        breakpoints=_breakpoints(body),
    )


def _breakpoints(body: api.CountTokensBody) -> Breakpoints:
    """Find the breakpoints of tools, of blocks and of the whole body."""
    contents = [body.system or "", *(message.content for message in body.messages)]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    marked = [tool.cache_control for tool in body.tools]
    marked += [block.cache_control for block in blocks]
    last = marked.pop() if isinstance(contents[-1], list) and contents[-1] else None
    end = body.cache_control or last
    inside = {mark.ttl for mark in marked if mark is not None}
    return Breakpoints(
        "1h" if "1h" in inside else "5m" if inside else "",
        "" if end is None else end.ttl,
    )


def _messages(body: api.CountTokensBody) -> list[requests.Message]:
    """The messages of a chat. The results of tools become messages of their own."""
    messages: list[requests.Message] = []
    if body.system:
        turn, _ = _split("system", body.system, "system")
        if isinstance(body.system, list):
            turn.parts = [text for text in turn.parts if not str(text).startswith(_BILLING)]
        messages.append(turn.message())
    for index, message in enumerate(body.messages):
        turn, results = _split(message.role, message.content, f"messages[{index}].content")
        messages += results
        if message.role == "assistant" or turn.parts or not results:
            messages.append(turn.message())
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise reject(f"messages[{len(body.messages) - 1}]", "has tool calls without their results")
    return messages


def _split(
    role: requests.Role, content: str | list[api.MessagesBlock], path: str
) -> tuple[Turn, list[requests.Message]]:
    """The parts of one message, and a message for each result of a tool.

    Raises Unsupported for a block of a type that the role does not have.
    """
    if isinstance(content, str):
        return Turn(role, [content]), []
    turn, results = Turn(role), []
    for index, block in enumerate(content):
        kind, kinds = block.type, _KINDS[role]
        if kind not in kinds:
            text = f"{path}[{index}]: blocks of type {kind!r} are not supported here"
            raise Unsupported(f"{text}; expected {', '.join(kinds)}", f"{path}[{index}]")
        if kind == "text":
            turn.parts.append(block.text)
        elif kind == "image":
            turn.parts.append(_image(block.source, f"{path}[{index}]"))
        elif kind == "thinking":
            turn.reasoning.append(block.thinking)
        elif kind == "tool_use":
            if not block.name:
                raise reject(f"{path}[{index}].name", "is required")
            function = requests.ParsedFunctionCall(name=block.name, arguments=block.input)
            turn.calls.append(requests.ToolCall(id=block.id, function=function))
        elif kind == "tool_result":
            result, _ = _split("tool", block.content or "", f"{path}[{index}].content")
            result.call_id = block.tool_use_id
            results.append(result.message())
    return turn, results


def _image(source: api.MessagesSource | None, path: str) -> ImagePart:
    """The image of a block. Raises InvalidRequest."""
    if source is None:
        raise reject(f"{path}.source", "is required")
    match source.type:
        case "base64":
            url = f"data:{source.media_type};base64,{source.data}"
        case "url":
            url = source.url
        case _:
            raise file_refused(path)
    return PlacedImage(image_url=ImageUrl(url=url), path=path)
