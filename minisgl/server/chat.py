"""Chat messages: checked, and brought to the form that chat templates are written for."""

from typing import Any

import msgspec

from minisgl.core import InvalidRequest, Unsupported
from minisgl.server import checks
from minisgl.utils import near_names

_ROLES = ("system", "developer", "user", "assistant", "tool")
_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
# A client that sends an earlier answer back also sends these, empty.
_EMPTY_FIELDS = ("refusal", "annotations", "audio", "function_call", "reasoning")


def read_messages(value: Any, max_messages: int) -> tuple[list[dict[str, Any]], int]:
    """The messages for the template, and how many characters of text they hold.

    `developer` becomes `system`, which templates know; text parts are joined by newlines; the
    arguments of tool calls are parsed, since templates write them as JSON themselves.
    """
    if value is None:
        raise InvalidRequest("messages is required", param="messages")
    one = checks.Check(_message, {})
    messages = checks.list_of(one, max_messages, 1, "max_messages")("messages", value)
    return messages, sum(_chars(message) for message in messages)


def messages_schema(max_messages: int) -> dict[str, Any]:
    """JSON schema of what `read_messages` takes, but for tool calls without it."""
    text = {"type": "string"}
    parts = {
        "type": "array",
        "maxItems": 1024,
        "items": {
            "type": "object",
            "properties": {"type": {"const": "text"}, "text": text},
            "required": ["type", "text"],
            "additionalProperties": False,
        },
    }
    properties: dict[str, dict[str, Any]] = {
        "role": {"enum": list(_ROLES)},
        "content": {"anyOf": [text, parts]},
        **dict.fromkeys(("name", "tool_call_id", "reasoning_content"), text),
        "tool_calls": {"type": "array", "maxItems": 128},
        **{name: {"enum": [[], ""]} for name in _EMPTY_FIELDS},
    }
    one = checks.object_schema(properties, required=("role",))
    return {"type": "array", "items": one, "minItems": 1, "maxItems": max_messages}


def _message(param: str, value: Any) -> dict[str, Any]:
    given = checks.json_object(param, value)
    role = given.get("role")
    if role not in _ROLES:
        raise checks.reject(f"{param}.role", f"must be one of {', '.join(_ROLES)}")
    for name, entry in given.items():
        if name in _FIELDS or (name in _EMPTY_FIELDS and entry in (None, [], "")):
            continue
        if name in _EMPTY_FIELDS:
            raise Unsupported(f"{param}.{name} is not supported", param=param)
        raise InvalidRequest(
            f"{param} has an unknown field{near_names(name, _FIELDS)}", param=param
        )
    message: dict[str, Any] = {"role": "system" if role == "developer" else role}
    message["content"] = _content(f"{param}.content", given.get("content"))
    if given.get("tool_calls"):
        if role != "assistant":
            raise checks.reject(f"{param}.tool_calls", "belongs to the role assistant")
        message["tool_calls"] = checks.list_of(checks.Check(_tool_call, {}), max_items=128)(
            f"{param}.tool_calls", given["tool_calls"]
        )
    elif message["content"] is None:
        raise checks.reject(f"{param}.content", "is required")
    for name in ("name", "tool_call_id", "reasoning_content"):
        if given.get(name) is not None:
            message[name] = checks.string()(f"{param}.{name}", given[name])
    return message


def _content(param: str, value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return str(checks.string()(param, value))
    if not isinstance(value, list):
        raise checks.reject(param, f"must be a string or an array, not {checks.type_name(value)}")
    return "\n".join(checks.list_of(checks.Check(_text_part, {}), max_items=1024)(param, value))


def _text_part(param: str, value: Any) -> str:
    part = checks.json_object(param, value)
    if part.get("type") != "text":
        raise Unsupported(f"{param}: only parts of type text are supported", param=param)
    if extra := set(part) - {"type", "text"}:
        raise InvalidRequest(
            f"{param} has an unknown field{near_names(min(extra), ['text'])}", param=param
        )
    return str(checks.string()(f"{param}.text", part.get("text")))


def _tool_call(param: str, value: Any) -> dict[str, Any]:
    call = checks.json_object(param, value)
    function = checks.json_object(f"{param}.function", call.get("function"))
    arguments = checks.string()(f"{param}.function.arguments", function.get("arguments"))
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        raise checks.reject(f"{param}.function.arguments", "must be JSON in a string") from None
    name = checks.string(max_chars=256, empty=False)(f"{param}.function.name", function.get("name"))
    return {
        "id": checks.string(max_chars=256)(f"{param}.id", call.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": parsed},
    }


def _chars(message: dict[str, Any]) -> int:
    texts = (message.get(name) for name in ("content", "name", "reasoning_content"))
    calls = message.get("tool_calls", ())
    return sum(len(text) for text in texts if text) + sum(len(str(call)) for call in calls)
