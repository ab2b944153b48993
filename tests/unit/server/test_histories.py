"""Histories with answers of this server and of others: the chats that templates render."""

import json
from functools import cache
from typing import Any

import msgspec
import pytest

from minisgl.core import Unsupported
from minisgl.message.messages import TokenizeChat
from minisgl.protocol.requests import CHAT, MESSAGES, RESPONSES
from minisgl.tokenizer.template import ChatTemplate
from tests.unit.server.test_api_requests import KNOWS, chat_of, options_of, read, user
from tests.unit.tool_calls.answers import load_template
from tests.unit.tool_calls.test_templates import OWN, PATHS, PUBLISHED

FORMATS = {**{name: name for name in OWN}, **PUBLISHED}
# A call that max_tokens has cut, JSON that is no object, and text that is no JSON.
BROKEN = ['{"city": "Ro', "NaN", "[1, 2", "Rome please", "[" * 5000]
CALL_ID = "abcdefghi"


@cache
def template_of(name: str) -> ChatTemplate:
    return load_template(PATHS[name])


def rendered(name: str, route: str, **body: Any) -> str:
    """The prompt of this body with the template of this name."""
    facts = msgspec.structs.replace(KNOWS, tool_format=FORMATS[name])
    tool: dict[str, Any] = {"name": "weather", "description": "d", "parameters": {"type": "object"}}
    tools = [{"type": "function", "function": tool}]
    if route == RESPONSES:
        tools = [{"type": "function", **tool}]
    prompt = read(route, facts=facts, tools=tools, **body).prompts[0][1]
    assert isinstance(prompt, TokenizeChat)
    options = {**json.loads(prompt.template_kwargs_json), "tools": json.loads(prompt.tools_json)}
    return template_of(name).render(json.loads(prompt.messages_json), options)


@pytest.mark.parametrize("arguments", BROKEN, ids=lambda text: text[:12])
@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_call_of_the_model_is_text_in_later_prompts(name: str, arguments: str) -> None:
    """The server once refused its own answer, so that each later turn of the chat was a 400."""
    call = {"id": CALL_ID, "function": {"name": "weather", "arguments": arguments}}
    result = "the arguments are no JSON"
    messages = [
        user("hi"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": result},
    ]
    items = [
        user("hi"),
        {"type": "function_call", "call_id": CALL_ID, "name": "weather", "arguments": arguments},
        {"type": "function_call_output", "call_id": CALL_ID, "output": result},
    ]
    written = json.dumps(arguments)[1:-1]  # a template may escape the text as JSON
    for prompt in (rendered(name, CHAT, messages=messages), rendered(name, RESPONSES, input=items)):
        assert "weather" in prompt
        assert arguments in prompt or written in prompt
        assert result in prompt


THOUGHT = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm", "index": 0}]},
        {"reasoning_details": [{"type": "reasoning.summary", "summary": "hm"}]},
        {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"reasoning_content": "hm", "reasoning": "other"},
    ],
)
def test_reasoning_in_the_fields_of_other_servers_reaches_the_template(
    fields: dict[str, Any],
) -> None:
    chat = chat_of(read(CHAT, messages=[user("a"), {**THOUGHT, **fields}, user("c")]))
    assert chat[1] == {**THOUGHT, "reasoning_content": "hm"}


def test_empty_and_encrypted_reasoning_and_cache_control_are_left_out() -> None:
    cached = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": "a", **cached}]
    encrypted = [{"type": "reasoning.encrypted", "data": "x"}]
    sent = [
        {"role": "user", "content": parts, **cached},
        {**THOUGHT, "reasoning": "", "reasoning_details": encrypted},
        {**THOUGHT, "reasoning": None, "reasoning_details": []},
    ]
    assert chat_of(read(CHAT, messages=sent)) == [user("a"), THOUGHT, THOUGHT]


SWITCH = msgspec.structs.replace(KNOWS, template_variables=("enable_thinking",))
OTHER_SWITCH = msgspec.structs.replace(KNOWS, template_variables=("thinking",))
BUDGET = msgspec.structs.replace(KNOWS, template_variables=("thinking_budget",))
EFFORT = msgspec.structs.replace(KNOWS, template_variables=("reasoning_effort",))
NOTHING = msgspec.structs.replace(KNOWS, template_variables=())


@pytest.mark.parametrize(
    ("facts", "options"),
    [
        (SWITCH, {"enable_thinking": False}),
        (OTHER_SWITCH, {"thinking": False}),
        (BUDGET, {"thinking_budget": 0}),
        (EFFORT, {"reasoning_effort": "none"}),
        (KNOWS, {"enable_thinking": False, "reasoning_effort": "none"}),
    ],
)
def test_effort_none_stops_thinking_with_each_template_that_can_stop_it(
    facts: Any, options: dict[str, Any]
) -> None:
    """It was once passed to templates with a variable for the effort only, and else ignored."""
    requests = [
        read(CHAT, facts=facts, messages=[user("a")], reasoning_effort="none"),
        read(CHAT, facts=facts, messages=[user("a")], reasoning={"effort": "none"}),
        read(RESPONSES, facts=facts, input="a", reasoning={"effort": "none"}),
        read(MESSAGES, facts=facts, messages=[user("a")], output_config={"effort": "none"}),
    ]
    for request in requests:
        assert options_of(request) == options
        assert request.ignored == ()


def test_other_efforts_do_not_switch_thinking() -> None:
    request = read(CHAT, facts=SWITCH, messages=[user("a")], reasoning_effort="low")
    assert (options_of(request), request.ignored) == ({}, ("reasoning_effort",))
    request = read(CHAT, facts=NOTHING, messages=[user("a")], reasoning_effort="none")
    assert (options_of(request), request.ignored) == ({}, ("reasoning_effort",))


@pytest.mark.parametrize(
    ("body", "options"),
    [
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"thinking": True}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "thinking": True},
            {"enable_thinking": False},
        ),
    ],
    ids=str,
)
def test_switches_of_other_servers_reach_the_template(
    body: dict[str, Any], options: dict[str, Any]
) -> None:
    assert options_of(read(CHAT, messages=[user("a")], **body)) == options


def test_budgets_of_other_servers_reach_the_template() -> None:
    for body in (
        {"reasoning": {"max_tokens": 9}},
        {"thinking": {"type": "enabled", "budget_tokens": 9}},
    ):
        request = read(CHAT, facts=BUDGET, messages=[user("a")], **body)
        assert options_of(request) == {"thinking_budget": 9}
    request = read(CHAT, facts=NOTHING, messages=[user("a")], reasoning={"max_tokens": 9})
    assert request.ignored == ("thinking_budget",)


def test_reasoning_that_is_to_be_left_out_is_refused() -> None:
    with pytest.raises(Unsupported, match="which the client may leave out") as refused:
        read(CHAT, messages=[user("a")], reasoning={"exclude": True})
    assert refused.value.param == "reasoning.exclude"
