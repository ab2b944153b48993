"""Requests of Responses and Messages: the chat that each becomes, their bounds and their errors."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.core import InvalidRequest
from minisgl.protocol.requests import CHAT, MESSAGES, RESPONSES
from minisgl.request.convert import RequestConverter
from minisgl.server.app import build_app
from minisgl.settings import Limits
from minisgl.settings.keys import key_hashes
from tests.unit.server.fakes import CONFIG, FACTS, World
from tests.unit.server.test_app import FakeService

KNOWS = msgspec.structs.replace(
    FACTS,
    tool_format="hermes",
    max_seq_len=10_000,
    template_variables=("enable_thinking", "reasoning_effort"),
)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = {"type": "text", "text": "a"}
TOOL_F = {"type": "function", "name": "f"}
FUNCTION = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}


def read(route: str, facts: Any = KNOWS, config: Any = CONFIG, **body: Any) -> Any:
    given = {"model": "m", **body}
    if route == MESSAGES:
        given.setdefault("max_tokens", 9)
    return RequestConverter(config).read(route, json.dumps(given).encode(), facts)


def responses(**body: Any) -> Any:
    return read(RESPONSES, **body)


def messages(*history: Any, **body: Any) -> Any:
    return read(MESSAGES, messages=list(history), **body)


def chat_of(request: Any) -> list[dict[str, Any]]:
    return json.loads(request.prompts[0][1].messages_json)


def options_of(request: Any) -> dict[str, Any]:
    return json.loads(request.prompts[0][1].template_kwargs_json)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def called(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": identity, "type": "function", "function": function}


def test_text_and_instructions_become_messages() -> None:
    assert chat_of(responses(input="hi")) == [user("hi")]
    expected = [{"role": "system", "content": "be brief"}, user("hi")]
    assert chat_of(responses(input="hi", instructions="be brief")) == expected


def test_items_of_one_turn_become_one_message() -> None:
    history = [
        {"role": "developer", "content": [{"type": "input_text", "text": "more rules"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "2+3?"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}],
            "encrypted_content": None,
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I add.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 2}'},
        {"type": "function_call", "call_id": "c2", "name": "f", "arguments": '{"a": 3}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {
            "type": "function_call_output",
            "call_id": "c2",
            "output": [{"type": "input_text", "text": "3"}],
        },
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "thanks"},
    ]
    assert chat_of(responses(input=history, instructions="rules")) == [
        {"role": "system", "content": "rules\n\nmore rules"},
        user("2+3?"),
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "hm",
            "tool_calls": [called("c1", "f", {"a": 2}), called("c2", "f", {"a": 3})],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
        {"role": "tool", "content": "3", "tool_call_id": "c2"},
        {"role": "assistant", "content": "5"},
        user("thanks"),
    ]


def test_blocks_become_messages() -> None:
    history = [
        user("2?"),
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I ask."},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 2}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t1",
                    "content": [{"type": "text", "text": "2"}],
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "Go on."},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1f3;"},
        {"type": "text", "text": "rules", "cache_control": {"type": "ephemeral"}},
    ]
    assert chat_of(messages(*history, system=system)) == [
        {"role": "system", "content": "rules"},
        user("2?"),
        {
            "role": "assistant",
            "content": "I ask.",
            "reasoning_content": "hm",
            "tool_calls": [called("t1", "f", {"a": 2})],
        },
        {"role": "tool", "content": "2", "tool_call_id": "t1"},
        user("Go on."),
    ]


def test_all_apis_give_the_same_request_for_the_same_chat() -> None:
    sampling = {"temperature": 0.5, "top_p": 0.9, "stream": True}
    chat = read(CHAT, messages=[user("hi")], max_tokens=9, tools=[FUNCTION], **sampling)
    flat = {"type": "function", **FUNCTION["function"]}  # type: ignore[dict-item]
    ours = responses(input="hi", max_output_tokens=9, tools=[flat], **sampling)
    tool = {"name": "f", "description": "d", "input_schema": SCHEMA}
    theirs = messages(user("hi"), tools=[tool], **sampling)
    for request in (ours, theirs):
        assert request.prompts[0][1] == chat.prompts[0][1]
        assert (request.sampling, request.text, request.stream) == (
            chat.sampling,
            chat.text,
            True,
        )
    assert chat.max_tokens_param == "max_tokens"
    assert ours.max_tokens_param == "max_output_tokens"
    assert {one.shrinks_max_tokens for one in (chat, ours, theirs)} == {True}


@pytest.mark.parametrize(
    ("choice", "named"),
    [
        ("none", None),
        ({"type": "function", "name": "f"}, True),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            0,
        ),
    ],
)
def test_tool_choices_of_responses(choice: Any, named: bool | None) -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "g")]
    request = responses(input="hi", tools=tools, tool_choice=choice)
    assert (request.text.tools is None) == (named is None)
    assert request.named_tool == bool(named)


@pytest.mark.parametrize(
    ("choice", "has_tools", "named"),
    [("auto", True, False), ("none", False, False), ("tool", True, True)],
)
def test_tool_choices_of_messages(choice: str, has_tools: bool, named: bool) -> None:
    given = {"type": choice, "disable_parallel_tool_use": True}
    tools = [{"name": "f"}, {"name": "g"}]
    if choice == "tool":
        given["name"] = "f"
    request = messages(user("hi"), tools=tools, tool_choice=given)
    assert (request.text.tools is not None, request.named_tool) == (has_tools, named)


def test_other_tools_and_unknown_template_options_are_ignored_and_counted() -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": []}]
    request = responses(input="hi", tools=tools, reasoning={"effort": "high", "summary": "auto"})
    assert request.ignored == ("tool", "tool")
    assert request.text.tools is None
    assert options_of(request) == {"reasoning_effort": "high"}
    request = responses(input="hi", facts=FACTS, reasoning={"effort": "high"})
    assert (request.ignored, options_of(request)) == (("reasoning_effort",), {})
    request = messages(user("hi"), output_config={"effort": "low"})
    assert (request.ignored, options_of(request)) == ((), {"reasoning_effort": "low"})
    request = read(CHAT, messages=[user("hi")], reasoning_effort="high")
    assert (request.ignored, options_of(request)) == ((), {"reasoning_effort": "high"})
    own = {"reasoning_effort": "none"}
    request = read(CHAT, messages=[user("hi")], reasoning_effort="high", chat_template_kwargs=own)
    assert options_of(request) == own, "chat_template_kwargs names the variable, so it wins"
    request = read(CHAT, messages=[user("hi")], facts=FACTS, reasoning_effort="high")
    assert (request.ignored, options_of(request)) == (("reasoning_effort",), {})
    thinking = {"type": "enabled", "budget_tokens": 1024}
    web = {"type": "web_search_20250305", "name": "web_search"}
    request = messages(user("hi"), tools=[web], thinking=thinking)
    assert request.ignored == ("thinking_budget", "tool")
    assert options_of(request) == {"enable_thinking": True}


def test_a_last_assistant_message_is_continued() -> None:
    request = messages(user("hi"), {"role": "assistant", "content": "Well"})
    assert chat_of(request)[-1] == {"role": "assistant", "content": "Well"}
    expected = {"continue_final_message": True, "add_generation_prompt": False}
    assert options_of(request) == expected
    chat = [user("hi"), {"role": "assistant", "content": "Well"}]
    request = read(CHAT, messages=chat, continue_final_message=True)
    assert options_of(request) == expected
    for more in (
        {"messages": [user("hi")]},
        {"messages": chat, "add_generation_prompt": True},
        {"messages": [{**chat[1], "content": None, "tool_calls": [called("c", "f", "{}")]}]},
    ):
        with pytest.raises(InvalidRequest):
            read(CHAT, continue_final_message=True, **more)


@pytest.mark.parametrize("store", [True, False, None])
def test_store_is_accepted_and_answered_false(store: bool | None) -> None:
    request = responses(input="a", store=store, include=["reasoning.encrypted_content"])
    assert "store" not in request.repeated


@pytest.mark.parametrize(
    ("route", "name", "item"),
    [
        (
            RESPONSES,
            "input",
            {"role": "user", "content": [{"type": "input_text", "text": "a"}] * 2},
        ),
        (MESSAGES, "messages", {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}),
        (
            MESSAGES,
            "messages",
            {
                "role": "user",
                "content": [{"type": "tool_result", "content": [TEXT]}],
            },
        ),
        (MESSAGES, "system", {"type": "text", "text": "a", "content": [TEXT, TEXT]}),
    ],
)
def test_history_is_bounded_in_all(route: str, name: str, item: dict[str, Any]) -> None:
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_messages=5))
    more = {"messages": [user("a")]} if name == "system" else {}
    read(route, config=config, **more, **{name: [item] * 2})
    with pytest.raises(InvalidRequest) as caught:
        read(route, config=config, **more, **{name: [item] * 3})
    assert (caught.value.param, caught.value.limit) == (name, "max_messages")


def post(path: str, body: Any, config: Any = CONFIG, **headers: str) -> httpx.Response:
    async def main() -> httpx.Response:
        transport = httpx.ASGITransport(build_app(FakeService(World(), config)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body, headers=headers)

    return asyncio.run(main())


KEYED = msgspec.structs.replace(CONFIG, api_key_hashes=key_hashes(["secret"], None))


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_errors_of_messages_have_the_form_of_anthropic(path: str) -> None:
    answer = post(path, {"model": "m"})
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "is required" in answer.json()["error"]["message"]
    twice = {"model": "m", "messages": [user("a")], "max_tokens": 1, "tools": [{"name": "f"}] * 2}
    if path.endswith("tokens"):
        del twice["max_tokens"]
    assert "tools[1].name must differ" in post(path, twice).json()["error"]["message"]
    other = {"model": "other", "messages": [user("a")], "max_tokens": 1}
    if path.endswith("tokens"):
        del other["max_tokens"]
    assert post(path, other).json()["error"]["type"] == "not_found_error"
    answer = post(path, other, KEYED)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    small = msgspec.structs.replace(CONFIG, limits=Limits(max_body_bytes=4))
    answer = post(path, other, small)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "request_too_large")
    full = msgspec.structs.replace(CONFIG, limits=Limits(max_connections=0))
    answer = post(path, other, full)
    assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
    assert answer.headers["retry-after"]


def test_errors_of_responses_have_the_form_of_openai() -> None:
    answer = post("/v1/responses", {"model": "m"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input"


def test_key_in_x_api_key() -> None:
    assert post("/v1/messages", {"model": "m"}, KEYED, **{"x-api-key": "secret"}).status_code == 400
    assert post("/v1/messages", {"model": "m"}, KEYED, **{"x-api-key": "wrong"}).status_code == 401
    both = {"authorization": "Bearer wrong", "x-api-key": "secret"}
    assert post("/v1/messages", {"model": "m"}, KEYED, **both).status_code == 401
