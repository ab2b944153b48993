"""Makes a chat from a request of Anthropic's Messages API."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from minisgl.core import ModelFacts, Unsupported
from minisgl.server.apis.translation import Translation
from minisgl.server.decode import reject
from minisgl.server.protocol import messages_api as api
from minisgl.server.protocol import requests

# Claude Code sends its version and a number that changes with each request in a system block of
# its own. The block would change the beginning of each prompt, so that no prefix could be cached.
_BILLING = "x-anthropic-billing-header:"
_THINKING = ("enable_thinking", "thinking")  # the names of this option in templates
_CUSTOM = (None, "custom")  # the types of a tool whose schema is in the request
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def translate(body: api.CountTokensBody, facts: ModelFacts) -> Translation:
    """The chat of this body. Raises InvalidRequest or Unsupported with the path in the body."""
    messages = _messages(body)
    options, ignored = _template_options(body, facts)
    parameters: dict[str, Any] = {}
    if isinstance(body, api.MessagesBody):
        parameters = {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    if body.output_config is not None and body.output_config.format is not None:
        schema = requests.NamedSchema(schema=body.output_config.format.schema)
        form = requests.ResponseFormat(type="json_schema", json_schema=schema)
        parameters["response_format"] = form
    chat = requests.ChatBody(
        model=body.model,
        messages=messages,
        chat_template_kwargs=options,
        reasoning_effort=body.output_config.effort if body.output_config else None,
        continue_final_message=messages[-1].role == "assistant" and bool(messages[-1].content),
        **_tool_parameters(body),
        **parameters,
    )
    ignored += tuple("tool" for tool in body.tools if tool.type not in _CUSTOM)
    return Translation(chat, ignored=ignored, fits_tokens=True)


def _template_options(
    body: api.CountTokensBody, facts: ModelFacts
) -> tuple[requests.TemplateOptions, tuple[str, ...]]:
    """The options that the chat template of the model knows, and the names of the others."""
    given: dict[str, Any] = {}
    if body.thinking is not None:
        names = set(_THINKING) & set(facts.template_variables) or _THINKING[:1]
        given |= dict.fromkeys(names, body.thinking.type != "disabled")
        if body.thinking.budget_tokens is not None:
            given["thinking_budget"] = body.thinking.budget_tokens
    known = {name: value for name, value in given.items() if name in facts.template_variables}
    return requests.TemplateOptions(**known), tuple(name for name in given if name not in known)


class _Blocks(NamedTuple):
    """The blocks of one message by kind. results: messages with the results of tools."""

    texts: list[str]
    thinking: list[str]
    calls: list[requests.ToolCall]
    results: list[requests.Message]


def _messages(body: api.CountTokensBody) -> list[requests.Message]:
    """The messages of a chat. The results of tools become messages of their own."""
    messages: list[requests.Message] = []
    if body.system:
        system = body.system
        if not isinstance(system, str):
            texts = _split(system, "system", ("text",)).texts
            system = "\n".join([text for text in texts if not text.startswith(_BILLING)])
        messages.append(requests.Message(role="system", content=system))
    for index, message in enumerate(body.messages):
        if isinstance(message.content, str):
            messages.append(requests.Message(role=message.role, content=message.content))
            continue
        kinds = _KINDS[message.role]
        blocks = _split(message.content, f"messages[{index}].content", kinds)
        messages += blocks.results
        content = "\n".join(blocks.texts)
        if message.role == "assistant":
            messages.append(
                requests.Message(
                    role="assistant",
                    content=content,
                    reasoning_content="\n".join(blocks.thinking) or None,
                    tool_calls=blocks.calls or None,
                )
            )
        elif blocks.texts or not blocks.results:
            messages.append(requests.Message(role=message.role, content=content))
    last = messages[-1]
    if last.role == "assistant" and last.tool_calls:
        raise reject(f"messages[{len(body.messages) - 1}]", "has tool calls without their results")
    return messages


_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def _split(blocks: Sequence[api.MessagesBlock], path: str, kinds: Sequence[str]) -> _Blocks:
    """Sort the blocks by kind. Raises Unsupported for a block of another kind than `kinds`."""
    found = _Blocks([], [], [], [])
    for index, block in enumerate(blocks):
        kind = block.type
        if kind not in kinds:
            text = f"{path}[{index}]: blocks of type {kind[:64]!r} are not supported here"
            raise Unsupported(f"{text}; expected {', '.join(kinds)}", f"{path}[{index}]")
        if kind == "text":
            found.texts.append(block.text)
        elif kind == "thinking":
            found.thinking.append(block.thinking)
        elif kind == "tool_use":
            if not block.name:
                raise reject(f"{path}[{index}].name", "is required")
            function = requests.ParsedFunctionCall(name=block.name, arguments=block.input)
            found.calls.append(requests.ToolCall(id=block.id, function=function))
        elif kind == "tool_result":
            content = block.content or ""
            if isinstance(content, list):
                content = "\n".join(_split(content, f"{path}[{index}].content", ("text",)).texts)
            found.results.append(
                requests.Message(role="tool", content=content, tool_call_id=block.tool_use_id)
            )
    return found


def _tool_parameters(body: api.CountTokensBody) -> dict[str, Any]:
    """Return the tool parameters of a chat: the tools of the client, and the tool choice."""
    tools = [
        requests.Tool(
            type="function",
            function=requests.FunctionTool(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            ),
        )
        for tool in body.tools
        if tool.type in _CUSTOM
    ]
    choice = body.tool_choice or api.MessagesToolChoice(type="auto")
    return {
        "tools": tools,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "tool_choice": _CHOICES[choice.type]
        if choice.type in _CHOICES
        else requests.ToolChoice(type="function", function=requests.FunctionName(name=choice.name)),
    }
