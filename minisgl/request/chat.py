"""Brings the messages of a chat to the form that chat templates expect."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from minisgl.core import Unsupported
from minisgl.message.messages import SourceImage
from minisgl.protocol import requests
from minisgl.protocol.content import ImagePart, TemplateImage, TextPart
from minisgl.request.decode import reject
from minisgl.request.images import source_image
from minisgl.request.paths import Paths

_EFFORTS = ("low", "medium", "high")
THINKING = ("enable_thinking", "thinking")  # the names of this switch in templates
# The templates of these formats render each argument with its name. Others render any JSON value.
_NAMES_ARGUMENTS = ("atem", "gemma4", "glm", "minimax", "pythonic", "qwen3-coder")


def set_thinking(body: requests.ChatBody, known: Sequence[str]) -> list[str]:
    """Set the variables of the chat template that the parameters of the body give.

    A variable in chat_template_kwargs comes first. known: the variables that the template reads.
    Returns the options of which the template reads no variable. Raises Unsupported.
    """
    own, ignored = body.chat_template_kwargs, []
    for option, variables in _thinking_options(body).items():
        given = {name: value for name, value in variables.items() if value is not None}
        for name in given.keys() & {*known}:
            if getattr(own, name) is None:
                setattr(own, name, given[name])
        if given and not given.keys() & {*known}:
            ignored.append(option)
    return ignored


def _thinking_options(body: requests.ChatBody) -> dict[str, dict[str, Any]]:
    """The variables of each option. Raises Unsupported for reasoning.exclude."""
    reasoning = body.reasoning or requests.ChatReasoning()
    if reasoning.exclude:
        raise Unsupported(
            "reasoning.exclude is not supported; the answer has its reasoning in "
            "reasoning_content, which the client may leave out",
            param="reasoning.exclude",
        )
    effort = reasoning.effort if body.reasoning_effort is None else body.reasoning_effort
    thinking, budget = body.thinking, reasoning.max_tokens
    if isinstance(thinking, requests.Thinking):
        budget = budget if thinking.budget_tokens is None else thinking.budget_tokens
        thinking = thinking.type != "disabled"
    switches = (body.enable_thinking, thinking, reasoning.enabled)
    thinks = next((switch for switch in switches if switch is not None), None)
    stops = {**dict.fromkeys(THINKING, False), "thinking_budget": 0} if effort == "none" else {}
    return {
        "enable_thinking": dict.fromkeys(THINKING, thinks),
        "thinking_budget": {"thinking_budget": budget},
        "reasoning_effort": {"reasoning_effort": effort, "reasoning_strength": effort, **stops},
    }


def ending(body: requests.ChatBody, paths: Paths) -> dict[str, bool]:
    """Return the template options for the end of the prompt that differ from their defaults."""
    if not body.continue_final_message:
        return {} if body.add_generation_prompt is not False else {"add_generation_prompt": False}
    last = body.messages[-1]
    is_text = bool(last.content) and not _has_images(last.content)
    if last.role != "assistant" or not is_text or last.tool_calls:
        rule = "needs a last message of the role assistant with text and without tool calls"
        raise reject(paths["continue_final_message"], rule)
    if body.add_generation_prompt:
        raise reject(paths["add_generation_prompt"], "must be false with continue_final_message")
    return {"continue_final_message": True, "add_generation_prompt": False}


def _has_images(content: object) -> bool:
    """Whether a content has an image."""
    parts = content if isinstance(content, list) else ()
    return any(isinstance(part, ImagePart) for part in parts)


def prepare_messages(
    messages: Sequence[requests.Message], tool_format: str, paths: Paths
) -> tuple[int, tuple[SourceImage, ...]]:
    """Bring messages to the form that chat templates expect.

    Returns their number of characters and their images. `developer` becomes `system`, which
    templates know. Text parts are joined by newlines, unless images stand between them. The
    arguments of tool calls are parsed, because templates write them as JSON themselves. Fields that
    carry no information for a template are left out.
    """
    chars, images = 0, list[SourceImage]()
    for index, message in enumerate(messages):
        own_chars, own_images = _prepare(message, index, tool_format, paths)
        chars += own_chars
        images += own_images
    return chars, tuple(images)


def _prepare(
    message: requests.Message, index: int, tool_format: str, paths: Paths
) -> tuple[int, Sequence[SourceImage]]:
    """Prepare one message. Returns its number of characters and its images."""
    if message.role == "developer":
        message.role = "system"
    chars, images = 0, list[SourceImage]()
    if message.tool_calls:
        if message.role != "assistant":
            param = paths[f"messages[{index}].tool_calls"]
            raise reject(param, "is allowed only with role assistant")
        # Templates of Qwen and Mistral fail at null, which is the content of an answer with calls.
        if message.content is UNSET or message.content is None:
            message.content = ""
        chars += _parse_arguments(message, tool_format)
    elif message.content is UNSET or message.content is None:
        raise reject(paths[f"messages[{index}].content"], "is required")
    else:
        message.tool_calls = None
    if isinstance(message.content, list):
        path = paths[f"messages[{index}].content"]
        message.content, images = _joined(message.content, path)
    if message.reasoning or message.reasoning_details:
        message.reasoning_content = message.reasoning_content or _reasoning(message) or None
    # A loop over the names would be slower, and a chat may have thousands of messages.
    message.refusal = message.annotations = message.audio = message.cache_control = None
    message.function_call = message.reasoning = message.reasoning_details = None
    message.parsed = message.provider_specific_fields = None
    content: Any = message.content or ""
    texts = [content] if isinstance(content, str) else [getattr(p, "text", "") for p in content]
    chars += sum(map(len, texts)) + len(message.name or "")
    chars += len(message.tool_call_id or "") + len(message.reasoning_content or "")
    return chars, images


def _joined(parts: list[Any], path: str) -> tuple[Any, list[SourceImage]]:
    """The content of these parts: their text, or a list of them and their images."""
    if not _has_images(parts):
        return "\n".join([part.text for part in parts]), []
    content, images = list[Any](), list[SourceImage]()
    for number, part in enumerate(parts):
        if isinstance(part, ImagePart):
            images.append(source_image(part, f"{path}[{number}]"))
            content.append(TemplateImage())
        else:
            content.append(TextPart(text=part.text))
    return content, images


def _reasoning(message: requests.Message) -> str:
    """The reasoning of an earlier answer in the fields that other servers use."""
    details = message.reasoning_details or ()
    return message.reasoning or "".join([part.text or part.summary or "" for part in details])


def _parse_arguments(message: requests.Message, tool_format: str) -> int:
    """Parse the arguments of the tool calls, and return the calls' number of characters."""
    chars = 0
    for call in message.tool_calls or ():
        name, arguments = call.function.name, call.function.arguments
        if isinstance(call.function, requests.ParsedFunctionCall):
            chars += len(call.id) + len(name) + len(msgspec.json.encode(arguments).decode())
            continue
        parsed = _parsed(arguments, tool_format)
        call.function = requests.ParsedFunctionCall(name=name, arguments=parsed)
        chars += len(call.id) + len(name) + len(arguments)
    return chars


def _parsed(arguments: str, tool_format: str) -> Any:
    """The arguments of a tool call for the chat template.

    A model may write arguments that are not JSON, and max_tokens may cut them. The template then
    renders their text, so that the chat repeats the output of the model unchanged.
    """
    try:
        found = msgspec.json.decode(arguments or "{}")
    except (msgspec.MsgspecError, RecursionError):
        found = arguments
    if tool_format in _NAMES_ARGUMENTS and not isinstance(found, dict):
        return {"arguments": arguments}
    return found


def check_effort(effort: str | None, paths: Paths) -> None:
    """Raise InvalidRequest for an effort that gpt-oss does not know."""
    if effort not in (None, *_EFFORTS):
        rule = f"must be one of {', '.join(_EFFORTS)} for this model"
        raise reject(paths["reasoning_effort"], rule)


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


def atem_chat(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages as the template of Muse Glimmer renders them.

    The template leaves out content beside calls, so the content becomes a message before them.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            calls = {"role": message["role"], "tool_calls": message.pop("tool_calls")}
            chat += [{**message, "end_turn": False}, calls]
        else:
            chat.append(message)
    return chat
