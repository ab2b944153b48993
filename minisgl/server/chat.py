"""Chat messages: checked, and brought to the form that chat templates are written for."""

from typing import Any

import msgspec

from minisgl.core import Unsupported
from minisgl.server import checks
from minisgl.server.checks import Check


def messages_check(max_messages: int) -> Check:
    """Messages, as the template gets them.

    `developer` becomes `system`, which templates know; text parts are joined by newlines; the
    arguments of tool calls are parsed, since templates write them as JSON themselves. Of parts and
    of tool calls there may be as many as of messages.
    """
    messages = checks.list_of(Check(_message, _FIELDS.schema), max_messages, 1, "max_messages")

    def check(param: str, value: Any) -> Any:
        # Before any is looked at: a body has room for 600,000, and each takes 4 us or more.
        for name in ("content", "tool_calls") if isinstance(value, list) else ():
            entries = [m.get(name) for m in value[:max_messages] if isinstance(m, dict)]
            if sum(len(entry) for entry in entries if isinstance(entry, list)) > max_messages:
                rule = f"must have at most {max_messages} entries of {name} in all"
                raise checks.reject(param, rule, "max_messages")
        return messages(param, value)

    return Check(check, messages.schema)


def count_chars(message: dict[str, Any]) -> int:
    """Characters of text in a checked message."""
    texts = (message.get(name) for name in ("content", *_TEXTS))
    calls = message.get("tool_calls", ())
    return sum(len(text) for text in texts if text) + sum(len(str(call)) for call in calls)


def _message(param: str, value: Any) -> dict[str, Any]:
    given = _FIELDS(param, value)
    role = given["role"]
    message = {"role": "system" if role == "developer" else role, "content": given.get("content")}
    if given.get("tool_calls"):
        if role != "assistant":
            raise checks.reject(f"{param}.tool_calls", "belongs to the role assistant")
        message["tool_calls"] = given["tool_calls"]
    elif message["content"] is None:
        raise checks.reject(f"{param}.content", "is required")
    return message | {name: given[name] for name in _TEXTS if name in given}


def _role(param: str, value: Any) -> str:
    if value not in _ROLES:
        raise checks.reject(param, f"must be one of {', '.join(_ROLES)}")
    return str(value)


def _content(param: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    checks.require_type(param, value, "a string or an array", list)
    return "\n".join(_PARTS(param, value))


def _text_part(param: str, value: Any) -> str:
    part = checks.json_object(param, value)
    if part.get("type") != "text":
        raise Unsupported(f"{param}: only parts of type text are supported", param=param)
    return str(_PART(param, part)["text"])


def _tool_call(param: str, value: Any) -> dict[str, Any]:
    call = checks.json_object(param, value)
    function = checks.json_object(f"{param}.function", call.get("function"))
    arguments = checks.string()(f"{param}.function.arguments", function.get("arguments"))
    try:
        parsed = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        raise checks.reject(f"{param}.function.arguments", "must be JSON in a string") from None
    name = checks.string(256, empty=False)(f"{param}.function.name", function.get("name"))
    call_id = checks.string(256)(f"{param}.id", call.get("id", ""))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": parsed}}


def _empty(param: str, value: Any) -> None:
    if value not in ([], ""):
        raise Unsupported(f"{param} is not supported", param=param)


_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXTS = ("name", "tool_call_id", "reasoning_content")
# A client that sends an earlier answer back also sends these, empty.
_EMPTY = ("refusal", "annotations", "audio", "function_call", "reasoning")
_PART = checks.fields(
    {"type": Check(checks.as_is, {"const": "text"}), "text": checks.string()},
    required=("type", "text"),
)
_PARTS = checks.list_of(Check(_text_part, _PART.schema), 1024)
_FIELDS = checks.fields(
    {
        "role": Check(_role, {"enum": list(_ROLES)}),
        "content": Check(_content, {"anyOf": [{"type": "string"}, _PARTS.schema]}),
        **dict.fromkeys(_TEXTS, checks.string()),
        "tool_calls": checks.list_of(Check(_tool_call, {}), 128),
        **dict.fromkeys(_EMPTY, Check(_empty, {"enum": [[], ""]})),
    },
    required=("role",),
)
