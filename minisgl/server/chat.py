"""Brings the messages of a chat to the form that chat templates expect."""

from typing import Any

import msgspec
from msgspec import UNSET

from minisgl.protocol import requests
from minisgl.server.decode import reject

_EFFORTS = ("low", "medium", "high")


def ending(body: requests.ChatBody) -> dict[str, bool]:
    """Return the template options for the end of the prompt that differ from their defaults."""
    if not body.continue_final_message:
        return {} if body.add_generation_prompt is not False else {"add_generation_prompt": False}
    last = body.messages[-1]
    if last.role != "assistant" or not last.content or last.tool_calls:
        rule = "needs a last message of the role assistant with content and without tool calls"
        raise reject("continue_final_message", rule)
    if body.add_generation_prompt:
        raise reject("add_generation_prompt", "must be false with continue_final_message")
    return {"continue_final_message": True, "add_generation_prompt": False}


def prepare_message(message: requests.Message, index: int) -> int:
    """Bring one message to the form that chat templates expect. Returns its number of characters.

    `developer` becomes `system`, which templates know. Text parts are joined by newlines. The
    arguments of tool calls are parsed, because templates write them as JSON themselves. Fields
    that carry no information for a template are left out.
    """
    if message.role == "developer":
        message.role = "system"
    chars = 0
    if message.tool_calls:
        if message.role != "assistant":
            raise reject(f"messages[{index}].tool_calls", "is allowed only with role assistant")
        if message.content is UNSET:
            message.content = None
        chars += _parse_arguments(message, index)
    elif message.content is UNSET or message.content is None:
        raise reject(f"messages[{index}].content", "is required")
    else:
        message.tool_calls = None
    if isinstance(message.content, list):
        message.content = "\n".join([part.text for part in message.content])
    # A loop over the names would be slower, and a chat may have thousands of messages.
    message.refusal = message.annotations = message.audio = None
    message.function_call = message.reasoning = None
    message.parsed = message.provider_specific_fields = None
    chars += len(message.content or "") + len(message.name or "")
    return chars + len(message.tool_call_id or "") + len(message.reasoning_content or "")


def _parse_arguments(message: requests.Message, index: int) -> int:
    """Parse the arguments of the tool calls, and return the calls' number of characters."""
    chars = 0
    for number, call in enumerate(message.tool_calls or ()):
        name, arguments = call.function.name, call.function.arguments
        if isinstance(call.function, requests.ParsedFunctionCall):
            chars += len(call.id) + len(name) + len(msgspec.json.encode(arguments).decode())
            continue
        param = f"messages[{index}].tool_calls[{number}].function.arguments"
        parsed = parse_arguments(arguments, param)
        call.function = requests.ParsedFunctionCall(name=name, arguments=parsed)
        chars += len(call.id) + len(name) + len(arguments)
    return chars


def parse_arguments(arguments: str, param: str) -> Any:
    """The arguments of a tool call. Raises InvalidRequest with this param if they are not JSON."""
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        raise reject(param, "must be JSON in a string") from None


def check_effort(effort: str | None) -> None:
    """Raise InvalidRequest for an effort that gpt-oss does not know."""
    if effort not in (None, *_EFFORTS):
        raise reject("reasoning_effort", f"must be one of {', '.join(_EFFORTS)} for this model")


def harmony_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as the template of gpt-oss renders them.

    The template renders one call for each message of the assistant, and names the results that
    follow after this call. It reads reasoning from `thinking`, and renders it, or content beside a
    call, as reasoning.
    """
    chat: list[dict[str, Any]] = []
    rest = messages[::-1]
    while rest:
        message = rest.pop()
        calls = message.pop("tool_calls", None)
        reasoning = message.pop("reasoning_content", None)
        if not calls:
            chat.append(message)
            continue
        results: list[dict[str, Any]] = []
        while rest and rest[-1]["role"] == "tool":
            results.append(rest.pop())
        thoughts = [text for text in (reasoning, message.pop("content", None)) if text]
        if thoughts:
            message["thinking"] = "\n\n".join(thoughts)
        for index, call in enumerate(calls):
            chat.append({**(message if not index else {"role": "assistant"}), "tool_calls": [call]})
            own = [result for result in results if result.get("tool_call_id") == call["id"]]
            results = [result for result in results if result not in own]
            chat += own
        chat += results
    return chat
