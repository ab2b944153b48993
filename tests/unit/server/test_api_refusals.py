"""Refusals of Responses and Messages name the path of the field in the body of the client."""

import json
from typing import Any

import msgspec
import pytest

from minisgl.core import InvalidRequest, RequestError, Unsupported
from minisgl.protocol.requests import MESSAGES, RESPONSES
from minisgl.request.fit import fit_call
from minisgl.request.paths import Paths
from minisgl.settings import Limits
from tests.unit.server.fakes import CONFIG
from tests.unit.server.test_api_requests import (
    KNOWS,
    SCHEMA,
    TOOL_F,
    messages,
    read,
    responses,
    user,
)

FILE = {"type": "input_file", "file_data": "data:"}
REFUSED_RESPONSES: list[tuple[dict[str, Any], str, type[RequestError]]] = [
    ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id", Unsupported),
    ({"input": "a", "conversation": "c"}, "conversation", Unsupported),
    ({"input": "a", "background": True}, "background", Unsupported),
    ({"input": []}, "input", InvalidRequest),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", Unsupported),
    ({"input": [{"role": "user", "content": [FILE]}]}, "input[0].content[0]", Unsupported),
    ({"input": [{"role": "user"}]}, "input[0].content", InvalidRequest),
    ({"input": [{"content": "a"}]}, "input[0].role", InvalidRequest),
    ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role", InvalidRequest),
    ({"input": [{"type": "function_call", "arguments": ""}]}, "input[0].name", InvalidRequest),
    ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name", InvalidRequest),
    ({"input": "a", "tool_choice": {"type": "mcp"}}, "tool_choice.type", Unsupported),
    ({"input": "a", "tool_choice": "required"}, "tool_choice", InvalidRequest),
    ({"input": "a", "metadata": {"a": 1}}, "metadata[...]", InvalidRequest),
    ({"input": "a", "max_output_tokens": 0}, "max_output_tokens", InvalidRequest),
    ({"input": "a", "inputs": "a"}, "inputs", InvalidRequest),
    ({}, "input", InvalidRequest),
]
REFUSED_MESSAGES: list[tuple[dict[str, Any], str, type[RequestError]]] = [
    ({"messages": []}, "messages", InvalidRequest),
    ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role", InvalidRequest),
    (
        {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
        "messages[0].content[0]",
        Unsupported,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}]},
        "messages[0].content[0]",
        Unsupported,
    ),
    (
        {"messages": [user("a")], "system": [{"type": "text", "content": [{"type": "x"}]}]},
        "system[0].content[0].type",
        InvalidRequest,
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "messages[0].content[0].text",
        InvalidRequest,
    ),
    (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        "messages[0]",
        InvalidRequest,
    ),
    ({"messages": [user("a")], "max_tokens": 0}, "max_tokens", InvalidRequest),
    ({"messages": [user("a")], "thinking": {"type": "x"}}, "thinking.type", InvalidRequest),
    ({"messages": [user("a")], "mcp_servers": [{}]}, "mcp_servers", Unsupported),
    ({"messages": [user("a")], "n": 2}, "n", InvalidRequest),
    (
        {"messages": [user("a")], "cache_control": {"ttl": "2h"}},
        "cache_control.ttl",
        InvalidRequest,
    ),
    ({"messages": [user("a")], "thread": {"type": "create"}}, "thread", Unsupported),
]


@pytest.mark.parametrize(
    ("route", "body", "param", "kind"),
    [(RESPONSES, *case) for case in REFUSED_RESPONSES]
    + [(MESSAGES, *case) for case in REFUSED_MESSAGES],
)
def test_refusals_name_the_field(
    route: str, body: dict[str, Any], param: str, kind: type[RequestError]
) -> None:
    with pytest.raises(RequestError) as caught:
        read(route, **body)
    assert type(caught.value) is kind
    assert caught.value.param == param


ASKED = [user("a")]
BEGUN = [*ASKED, {"role": "assistant", "content": "b"}]
F = {"name": "f"}
ONLY = {"type": "allowed_tools", "mode": "auto"}
REQUIRED = {"mode": "required", "tools": []}
WEB = {"type": "web_search", "name": "w"}
CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
LONG = {"type": "json_schema", "schema": {"title": "a" * 2**20}}
FORMAT = {"type": "json_schema", "schema": SCHEMA}
ANY = {"type": "any"}
# A body whose chat is refused, the path in the body, and a further path that the message names.
REFUSED_CHATS: list[tuple[str, dict[str, Any], str, str]] = [
    (RESPONSES, {"tools": [WEB, TOOL_F, TOOL_F]}, "tools[2].name", ""),
    (RESPONSES, {"tool_choice": TOOL_F}, "tool_choice.name", ""),
    (RESPONSES, {"tool_choice": {**ONLY, "tools": [WEB, TOOL_F]}}, "tool_choice.tools[1].name", ""),
    (RESPONSES, {"tools": [TOOL_F], "tool_choice": {**ONLY, **REQUIRED}}, "tool_choice", "tools"),
    (
        RESPONSES,
        {"tools": [TOOL_F], "tool_choice": {**ONLY, **REQUIRED, "tools": [WEB]}},
        "tool_choice",
        "tools",
    ),
    (RESPONSES, {"text": {"format": {"type": "x"}}}, "text.format.type", ""),
    (RESPONSES, {"text": {"format": {"type": "structural_tag"}}}, "text.format", ""),
    (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", ""),
    (RESPONSES, {"text": {"format": LONG}}, "text.format.schema", ""),
    (RESPONSES, {"reasoning": {"effort": "x"}}, "reasoning.effort", ""),
    (MESSAGES, {"tools": [WEB, F, F]}, "tools[2].name", ""),
    (MESSAGES, {"tools": [F], "tool_choice": {"type": "tool"}}, "tool_choice.name", ""),
    (MESSAGES, {"tool_choice": ANY}, "tool_choice", "tools"),
    (MESSAGES, {"output_config": {"format": LONG}}, "output_config.format.schema", ""),
    (MESSAGES, {"output_config": {"effort": "x"}}, "output_config.effort", ""),
    (MESSAGES, {"messages": BEGUN, "tools": [F], "tool_choice": ANY}, "messages[1]", "tools"),
    (
        MESSAGES,
        {"messages": BEGUN, "output_config": {"format": FORMAT}},
        "messages[1]",
        "output_config.format.schema",
    ),
]


@pytest.mark.parametrize(("route", "body", "param", "other"), REFUSED_CHATS)
def test_refusals_of_the_chat_name_paths_of_the_body(
    route: str, body: dict[str, Any], param: str, other: str
) -> None:
    body = {"input" if route == RESPONSES else "messages": ASKED, **body}
    with pytest.raises(RequestError) as caught:
        read(route, facts=msgspec.structs.replace(KNOWS, tool_format="harmony"), **body)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)
    assert other in caught.value.message


def test_allowed_tools_that_are_all_ignored_count_as_no_tools() -> None:
    """Regression: with a format of calls, the answer was searched for calls."""
    request = responses(input="a", tools=[TOOL_F], tool_choice={**ONLY, "tools": [WEB]})
    assert request.prompts == responses(input="a").prompts
    assert request.text.tools is None


def test_later_errors_name_paths_of_the_body() -> None:
    """The tokenizer workers check schemas, and the lengths of prompts are known after them."""
    harmony = msgspec.structs.replace(KNOWS, tool_format="harmony")
    for facts in (KNOWS, harmony):
        request = responses(input="a", text={"format": FORMAT}, facts=facts)
        assert (request.grammar.param, request.prompts[0][0]) == ("text.format.schema", "input")
        request = messages(user("a"), output_config={"format": FORMAT}, facts=facts)
        assert request.grammar.param == "output_config.format.schema"
    strict = msgspec.structs.replace(CONFIG, strict_max_tokens=True)
    request = responses(input="a", max_output_tokens=20, config=strict)
    for most, remedy in ((20, "lower max_output_tokens$"), (10, "shorten the prompts$")):
        with pytest.raises(InvalidRequest, match=remedy) as caught:
            fit_call(request, [10], [20], KNOWS, most)
        assert caught.value.param == "max_output_tokens"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tools[1].function", "tools[3]"),
        ("tools[1].function.name", "tools[3].name"),
        ("tools[1].functions", "tools[1].functions"),
        ("tools[10].function", "tools[10].function"),
        ("messages[0].content", "input[0].content"),
        ("temperature", "temperature"),
    ],
)
def test_the_longest_matching_path_is_replaced(path: str, expected: str) -> None:
    paths = {"messages": "input", "tools": "tools", "tools[1].function": "tools[3]"}
    assert Paths(paths)[path] == expected


def test_arguments_of_any_depth_are_read_or_refused() -> None:
    """Regression: some depths ended in a RecursionError, since encoding needs a deeper stack."""
    refused = 0
    for depth in range(700, 1200):
        arguments = "[" * depth + "]" * depth
        try:
            responses(input=[*ASKED, {**CALL, "arguments": arguments}])
        except InvalidRequest:
            refused += 1
    assert refused < 500


def test_arguments_count_by_characters() -> None:
    """Regression: bytes were counted."""
    arguments = json.dumps({"a": "é" * 50}, ensure_ascii=False)
    config = msgspec.structs.replace(CONFIG, limits=Limits(max_prompt_chars=80))
    read(RESPONSES, config=config, input=[*ASKED, {**CALL, "arguments": arguments}])


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(Unsupported, match="send the whole history in input"):
        responses(input="a", previous_response_id="resp_1")
    with pytest.raises(InvalidRequest, match="must be one of enabled, disabled, adaptive"):
        messages(user("a"), thinking={"type": "x"})
    with pytest.raises(InvalidRequest, match="must be one of user, assistant, system"):
        messages({"role": "tool", "content": "a"})
