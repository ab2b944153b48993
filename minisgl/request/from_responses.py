"""Makes a chat from a request of OpenAI's Responses API.

The server stores nothing, so each request has its whole history. A chat has one message for each
turn of the assistant, with reasoning, text and tool calls. In the Responses API these are separate
items, so consecutive items of the assistant become one message.
"""

from typing import Any

from minisgl.core import Unsupported
from minisgl.protocol import requests
from minisgl.protocol import responses_api as api
from minisgl.protocol.content import ImagePart, ImageUrl, PlacedImage
from minisgl.request.decode import reject
from minisgl.request.images import file_refused
from minisgl.request.paths import Paths
from minisgl.request.sealed import unseal
from minisgl.request.translation import (
    Translation,
    Turn,
    chat_tool,
    function_paths,
    shared_parameters,
)

# Paths in a chat, each with its path in a body of Responses; see Paths.
_PATHS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format.schema",  # for an error that it is missing
    "response_format.json_schema.schema": "text.format.schema",
    "tool_choice.function": "tool_choice",
}
LOGPROBS = "message.output_text.logprobs"  # words of `include`
ENCRYPTED = "reasoning.encrypted_content"
_REPEATED = set(api.ModelResponse.__struct_fields__) & set(api.ResponsesBody.__struct_fields__)
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})


def translate(body: api.InputTokensBody) -> Translation:
    """The chat of this body. Raises InvalidRequest or Unsupported with the path in the body."""
    parameters, answer = shared_parameters(body), dict[str, Any]()
    if isinstance(body, api.ResponsesBody):
        logprobs = LOGPROBS in body.include
        if body.top_logprobs and not logprobs:
            raise reject("top_logprobs", f"is allowed only with {LOGPROBS} in include")
        parameters |= {"logprobs": logprobs, "top_logprobs": body.top_logprobs}
        parameters["max_tokens"] = body.max_output_tokens
        answer = {"repeated": _repeated(body), "include": tuple(body.include)}
    chat = requests.ChatBody(
        **parameters,
        messages=_messages(body),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.text),
    )
    ignored = tuple("tool" for tool in body.tools if tool.type != "function")
    named = [] if isinstance(body.tool_choice, str) else body.tool_choice.tools or []
    allowed = "tool_choice.allowed_tools.tools"
    paths = {
        **_PATHS,
        **function_paths("tools", "tools", [tool.type == "function" for tool in body.tools]),
        **function_paths(allowed, "tool_choice.tools", map(_is_function, named)),
    }
    return Translation(chat, Paths(paths), ignored=ignored, **answer)


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "function"


def _messages(body: api.InputTokensBody) -> list[requests.Message]:
    """The messages of a chat."""
    turns = [Turn("system", [body.instructions])] if body.instructions else []
    items = body.input
    if isinstance(items, str):
        items = [api.ResponsesItem(role="user", content=items)]
    for index, item in enumerate(items):
        path = f"input[{index}]"
        match item.type:
            case "message":
                _add_message(turns, item, path)
            case "function_call":
                _turn(turns, "assistant").calls.append(_call(item, path))
            case "function_call_output":
                content = _parts(item.output, f"{path}.output")
                turns.append(Turn("tool", content, call_id=item.call_id))
            case "reasoning":
                _turn(turns, "assistant").reasoning.append(_reasoning(item, path))
            case "item_reference":
                raise Unsupported(
                    f"{path} refers to a stored item, and the server stores nothing; send the item "
                    "itself, as clients do with store set to false",
                    path,
                )
            case _:
                raise Unsupported(
                    f"{path}: items of type {item.type[:64]!r} are not supported", path
                )
    return [turn.message("\n\n" if turn.role == "system" else "\n") for turn in turns]


def _add_message(turns: list[Turn], item: api.ResponsesItem, path: str) -> None:
    if item.role is None or item.role == "tool":
        raise reject(f"{path}.role", "must be one of system, developer, user, assistant")
    if item.content is None:
        raise reject(f"{path}.content", "is required")
    role: requests.Role = "system" if item.role == "developer" else item.role
    _turn(turns, role).parts.extend(_parts(item.content, f"{path}.content"))


def _turn(turns: list[Turn], role: requests.Role) -> Turn:
    """The turn to which an item of this role belongs.

    Consecutive items of the assistant are one turn. Consecutive system items at the beginning are
    one turn too, because many chat templates accept only one system message.
    """
    joins = role == "assistant" or (role == "system" and len(turns) == 1)
    if not (joins and turns and turns[-1].role == role):
        turns.append(Turn(role))
    return turns[-1]


def _reasoning(item: api.ResponsesItem, path: str) -> str:
    """The reasoning of an earlier answer."""
    text = _text(item.content, f"{path}.content") or _text(item.summary, f"{path}.summary")
    if text or not item.encrypted_content:
        return text
    found = unseal(item.encrypted_content)
    if found is None:
        raise reject(f"{path}.encrypted_content", "is not from this server; leave this item out")
    return found


def _call(item: api.ResponsesItem, path: str) -> requests.ToolCall:
    if not item.name:
        raise reject(f"{path}.name", "is required")
    function = requests.FunctionCall(name=item.name, arguments=item.arguments)
    return requests.ToolCall(id=item.call_id, function=function)


def _parts(content: api.Content, path: str) -> list[str | ImagePart]:
    """The text of a content, or its texts and images. Raises InvalidRequest or Unsupported."""
    parts = content if isinstance(content, list) else []
    if all(part.type != "input_image" for part in parts):
        return [_text(content, path)]
    return [
        _image(part, f"{path}[{index}]")
        if part.type == "input_image"
        else _text([part], path, index)
        for index, part in enumerate(parts)
    ]


def _image(part: api.ResponsesPart, path: str) -> ImagePart:
    if part.file_id is not None:
        raise file_refused(path)
    if part.image_url is None:
        raise reject(f"{path}.image_url", "is required")
    url = ImageUrl(url=part.image_url, detail=part.detail)
    return PlacedImage(image_url=url, path=path)


def _text(content: api.Content, path: str, first: int = 0) -> str:
    """The text of a content, whose first part has this index. Raises Unsupported."""
    if not isinstance(content, list):
        return content or ""
    for index, part in enumerate(content, first):
        if part.type not in _TEXT_PARTS:
            text = f"{path}[{index}]: parts of type {part.type[:64]!r} are not supported here"
            raise Unsupported(text, f"{path}[{index}]")
    return "\n".join([part.text for part in content])


def _tools(body: api.InputTokensBody) -> list[requests.Tool]:
    """The tools of type function."""
    for index, tool in enumerate(body.tools):
        if tool.type == "function" and not tool.name:
            raise reject(f"tools[{index}].name", "is required")
    return [chat_tool(tool) for tool in body.tools if tool.type == "function"]


def _tool_choice(
    given: requests.ToolMode | api.ResponsesToolChoice,
) -> requests.ToolMode | requests.ToolChoice:
    if isinstance(given, str):
        return given
    if given.type == "function":
        function = requests.FunctionName(name=given.name or "")
        return requests.ToolChoice(type="function", function=function)
    if given.type != "allowed_tools":
        raise Unsupported("tool_choice.type must be function or allowed_tools", "tool_choice.type")
    names = [tool.get("name") for tool in given.tools or [] if _is_function(tool)]
    tools = [
        requests.ToolName(type="function", function=requests.FunctionName(name=str(name)))
        for name in names
    ]
    allowed = requests.AllowedTools(mode=given.mode or "auto", tools=tools)
    return requests.ToolChoice(type="allowed_tools", allowed_tools=allowed)


def _response_format(text: api.TextConfig | None) -> requests.ResponseFormat | None:
    if text is None or text.format is None:
        return None
    schema = text.format.schema
    named = None if schema is None else requests.NamedSchema(schema=schema)
    return requests.ResponseFormat(type=text.format.type, json_schema=named)


def _repeated(body: api.ResponsesBody) -> dict[str, Any]:
    """The parameters that an answer repeats."""
    return {
        **{name: getattr(body, name) for name in _REPEATED},
        "reasoning": body.reasoning or api.ResponsesReasoning(),
        "text": body.text or api.TextConfig(format=api.TextFormat(type="text")),
        "tools": [tool for tool in body.tools if tool.type == "function"],
    }
