"""Tools of a chat: the data for the template and the detokenizer, and the refused requests."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from minisgl.core import FinishReason, InvalidRequest, ModelFacts, RequestError, Unsupported
from minisgl.message.messages import Ready, TokenizeChat, ToolCallDelta
from minisgl.protocol.requests import CHAT
from minisgl.request.convert import RequestConverter
from minisgl.server.answer.openai import ResponseWriter
from minisgl.server.answer.stream import events
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.tool_calls.grammar import ToolGrammar
from tests.unit.server.fakes import CONFIG, FACTS, World

KNOWS = msgspec.structs.replace(FACTS, tool_format="hermes")
MISTRAL = msgspec.structs.replace(FACTS, tool_format="mistral")
HARMONY = msgspec.structs.replace(
    FACTS, tool_format="harmony", template_variables=("reasoning_effort",)
)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [function("weather", description="d", parameters=SCHEMA), function("now")]


def read(facts: ModelFacts = KNOWS, **body: Any) -> Any:
    chat = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **body}
    return RequestConverter(CONFIG).read(CHAT, json.dumps(chat).encode(), facts)


def prompt_of(request: Any) -> TokenizeChat:
    ((_, prompt),) = request.prompts
    assert isinstance(prompt, TokenizeChat)
    return prompt


def refusal(**body: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(**body)
    return caught.value


def test_template_and_detokenizer_get_the_tools() -> None:
    request = read(tools=TOOLS)
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    expected = [TOOLS[0], function("now", parameters=none)]
    assert json.loads(prompt_of(request).tools_json) == expected
    assert request.text.tools.format == "hermes"
    assert request.text.tools.parameters == {"weather": {}, "now": {}}


def test_strict_is_not_shown_to_the_model() -> None:
    rendered = json.loads(prompt_of(read(tools=[function("f", strict=False)])).tools_json)
    assert "strict" not in rendered[0]["function"]


@pytest.mark.parametrize("body", [{"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_callable_tools_the_request_is_as_without_tools(body: dict[str, Any]) -> None:
    for facts in (FACTS, KNOWS):
        assert read(facts, **body) == read(facts)


def test_allowed_tools_hide_the_others() -> None:
    choice = {"mode": "auto", "tools": [function("now")]}
    request = read(tools=TOOLS, tool_choice={"type": "allowed_tools", "allowed_tools": choice})
    (tool,) = json.loads(prompt_of(request).tools_json)
    assert tool["function"]["name"] == "now"
    assert list(request.text.tools.parameters) == ["now"]


@pytest.mark.parametrize(
    ("tool_format", "words"),
    [("none", "does not describe tools"), ("unknown", "does not know the format")],
)
def test_a_model_without_tools_refuses_them(tool_format: str, words: str) -> None:
    facts = msgspec.structs.replace(FACTS, tool_format=tool_format)
    with pytest.raises(Unsupported, match=words) as caught:
        read(facts, tools=TOOLS)
    assert caught.value.param == "tools"


UNKNOWN = {"type": "function", "function": {"name": "x"}}
ONLY_UNKNOWN = {"mode": "auto", "tools": [UNKNOWN]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [*TOOLS, function("now")]}, "tools[2].function.name"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("f", parameters=1)]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function("f")] * 129}, "tools"),
        ({"tools": TOOLS, "tool_choice": UNKNOWN}, "tool_choice.function.name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": ONLY_UNKNOWN},
            },
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": UNKNOWN}, "tool_choice.function.name"),
    ],
)
def test_a_wrong_tool_or_choice_is_named(body: dict[str, Any], param: str) -> None:
    error = refusal(**body)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert "must be one of" in error.message or error.message.startswith(param)


def test_large_tools_count_as_prompt() -> None:
    error = refusal(tools=[function("f", description="x" * 10_000)])
    assert (error.param, error.limit) == ("tools", "max_prompt_chars")


def test_ids_of_a_history_get_the_form_that_mistral_needs() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [call, {**call, "id": "abcdefgh9"}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "1"},
    ]
    _, asked, answered = json.loads(prompt_of(read(MISTRAL, messages=history)).messages_json)
    first, second = (call["id"] for call in asked["tool_calls"])
    assert first == answered["tool_call_id"] != second == "abcdefgh9"
    assert len(first) == 9
    assert first.isalnum()
    unchanged = json.loads(prompt_of(read(KNOWS, messages=history)).messages_json)
    assert unchanged[1]["tool_calls"][0]["id"] == "call_1"


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}
            for name in ("f", "g")
        ],
    },
    {"role": "tool", "tool_call_id": "g", "content": "2"},
    {"role": "tool", "tool_call_id": "f", "content": "1"},
    {"role": "assistant", "content": "Done.", "reasoning_content": "So."},
]


def test_calls_of_a_history_get_the_order_that_harmony_needs() -> None:
    """Each message has one call, and its results follow it."""
    _, *found, last = json.loads(prompt_of(read(HARMONY, messages=HISTORY)).messages_json)
    first, _, second, _ = found
    assert [message.get("tool_call_id") for message in found] == [None, "f", None, "g"]
    assert [call["id"] for m in (first, second) for call in m["tool_calls"]] == ["f", "g"]
    assert first["thinking"] == "Hm.\n\nI look."
    assert not {"content", "reasoning_content"} & {*first, *second}
    assert "thinking" not in second
    assert (last["content"], "reasoning_content" in last) == ("Done.", False)


def test_chats_of_muse_glimmer_have_the_form_of_its_template() -> None:
    facts = msgspec.structs.replace(
        FACTS, tool_format="atem", template_variables=("reasoning_strength",)
    )
    request = read(facts, messages=HISTORY, tools=TOOLS, reasoning_effort="low")
    prompt = prompt_of(request)
    _, text, calls, *_ = json.loads(prompt.messages_json)
    assert (text["reasoning_content"], text["content"], text["end_turn"]) == (
        *("Hm.", "I look."),
        False,
    )
    assert ([call["id"] for call in calls["tool_calls"]], "content" in calls) == (["f", "g"], False)
    assert json.loads(prompt.template_kwargs_json) == {"reasoning_strength": "low"}
    assert request.text.tools.parameters["weather"] == {"city": ["string"]}
    assert read(facts).text.tools.format == "atem"


@pytest.mark.parametrize("name", ["self", "user"])
def test_tools_of_muse_glimmer_have_no_name_of_another_recipient(name: str) -> None:
    """Regression: the calls of such a tool became reasoning or content."""
    facts = msgspec.structs.replace(FACTS, tool_format="atem")
    tools = [*TOOLS, {"type": "function", "function": {"name": name}}]
    with pytest.raises(InvalidRequest, match=f"must not be '{name}'") as error:
        read(facts, tools=tools, tool_choice="required")
    assert error.value.param == f"tools[{len(TOOLS)}].function.name"
    named = {"type": "function", "function": {"name": "now"}}
    assert read(facts, tools=tools, tool_choice=named).grammar is not None
    assert read(HARMONY, tools=tools).text.tools is not None


def test_all_answers_of_harmony_have_its_format() -> None:
    plain = read(HARMONY)
    assert plain.text.tools is not None
    assert (plain.text.tools.format, plain.text.tools.parameters) == ("harmony", {})
    assert (prompt_of(plain).tools_json, plain.grammar) == (b"null", None)
    assert read(HARMONY, tools=TOOLS, tool_choice="none") == plain
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    grammar = read(HARMONY, response_format=schema).grammar
    wanted = msgspec.json.decode(grammar.message.text, type=ToolGrammar)
    assert (wanted.tools, wanted.must_call, wanted.answer) == ([], False, SCHEMA)
    named = {"type": "function", "function": {"name": "now"}}
    wanted = msgspec.json.decode(
        read(HARMONY, tools=TOOLS, tool_choice=named).grammar.message.text, type=ToolGrammar
    )
    assert ([name for name, _ in wanted.tools], wanted.must_call) == (["now"], True)
    (_, tool) = json.loads(prompt_of(read(HARMONY, tools=TOOLS)).tools_json)
    assert tool["function"]["description"] == "", "the template needs one"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"regex": "a"}, "regex"),
        ({"reasoning_effort": "minimal"}, "reasoning_effort"),
        (
            {
                "messages": [{"role": "assistant", "content": "a"}],
                "continue_final_message": True,
                "add_generation_prompt": False,
                "response_format": {"type": "json_object"},
            },
            "continue_final_message",
        ),
    ],
)
def test_parameters_without_a_form_in_harmony_are_refused(body: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(HARMONY, **body)
    assert caught.value.param == param


def test_the_facts_get_the_format_that_a_tokenizer_found() -> None:
    lifecycle = Lifecycle(frozenset({"tokenizer-0", "scheduler"}))
    assert lifecycle.on_ready(Ready(role="tokenizer-0", tool_format="llama3")) is None
    facts = lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
    assert facts is not None
    assert facts.tool_format == lifecycle.require_accepting().tool_format == "llama3"


# --- answers ------------------------------------------------------------------------------------

START, OTHER = ToolCallDelta(0, "", "call_a", "weather"), ToolCallDelta(1, "", "call_b", "now")
UPDATES: list[dict[str, Any]] = [
    {"text": "Let me see.", "calls": [START]},
    {"calls": [ToolCallDelta(0, '{"city": "R')]},
    {"calls": [ToolCallDelta(0, 'om"}'), OTHER, ToolCallDelta(1, "{}")], "reasoning": "hm"},
]
WHOLE_CALLS = [
    {"id": "call_a", "function": {"name": "weather", "arguments": '{"city": "Rom"}'}},
    {"id": "call_b", "function": {"name": "now", "arguments": "{}"}},
]


def answer(
    updates: list[dict[str, Any]], finish: FinishReason, stream: bool, **body: Any
) -> list[Any]:
    """The JSON of the answer, or of each event of the stream."""
    writer = ResponseWriter(read(tools=TOOLS, stream=stream, **body))

    async def main() -> list[Any]:
        world = World()
        generation = world.open(1)
        uid = generation.choices[0].uid
        pieces = events(generation, writer)
        found = b""
        for number, update in enumerate(updates):
            is_last = number == len(updates) - 1
            world.update(
                uid, **update, completion_tokens=number, finish=finish if is_last else None
            )
            if stream:
                found += await anext(pieces)
        if not stream:
            found = b"data: " + await writer.whole(generation)
        world.engine.close(generation)
        blocks = (block.removeprefix(b"data: ") for block in found.split(b"\n\n"))
        return [json.loads(block) for block in blocks if block not in (b"", b"[DONE]")]

    return asyncio.run(main())


def test_whole_answer_has_calls_and_the_text_before_them() -> None:
    (found,) = answer(UPDATES, FinishReason.STOP, stream=False)
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    assert choice["message"]["reasoning_content"] == "hm"
    assert choice["message"]["tool_calls"] == [{**c, "type": "function"} for c in WHOLE_CALLS]


def test_content_is_null_beside_calls_only() -> None:
    (found,) = answer([{"calls": [START]}], FinishReason.STOP, stream=False)
    assert found["choices"][0]["message"]["content"] is None
    (found,) = answer([{"text": ""}], FinishReason.STOP, stream=False)
    assert found["choices"][0]["message"]["content"] == ""
    assert "tool_calls" not in found["choices"][0]["message"]


def test_stream_has_one_part_of_one_call_per_event() -> None:
    chunks = answer(UPDATES, FinishReason.STOP, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": None}
    calls = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert all(len(parts) == 1 for parts in calls)
    begun = {"index": 0, "id": "call_a", "type": "function"}
    assert calls[0] == [{**begun, "function": {"name": "weather", "arguments": ""}}]
    assert calls[1] == [{"index": 0, "function": {"arguments": '{"city": "R'}}]
    assert [parts[0]["index"] for parts in calls] == [0, 0, 0, 1, 1]
    assert all(len(delta) == 1 for delta in deltas[1:-1])
    assert deltas[-1] == {}
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
def test_finish_reason_without_a_call_or_at_the_limit(stream: bool) -> None:
    for updates, finish, expected in [
        ([{"text": "a"}], FinishReason.STOP, "stop"),
        (UPDATES, FinishReason.LENGTH, "length"),
        (UPDATES, FinishReason.STOP, "tool_calls"),
    ]:
        found = answer(updates, finish, stream)
        assert found[-1]["choices"][0]["finish_reason"] == expected


# --- constraints --------------------------------------------------------------------------------

STRICT = [function("weather", parameters=SCHEMA, strict=True), function("now")]
NOW = {"type": "function", "function": {"name": "now"}}
ONLY_NOW = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NOW]}}
JSON_ANSWER = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("body", "names", "must_call", "parallel"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, ["weather", "now"], True, True),
        ({"tools": TOOLS, "tool_choice": NOW}, ["now"], True, False),
        ({"tools": TOOLS, "tool_choice": ONLY_NOW}, ["now"], True, True),
        ({"tools": TOOLS, "parallel_tool_calls": False}, ["weather", "now"], False, False),
        ({"tools": STRICT}, ["weather", "now"], False, True),
    ],
)
def test_a_guarantee_becomes_a_grammar(
    body: dict[str, Any], names: list[str], must_call: bool, parallel: bool
) -> None:
    constraint = read(**body).grammar
    assert (constraint.param, constraint.message.kind) == ("tools", "tool_calls")
    grammar = msgspec.json.decode(constraint.message.text, type=ToolGrammar)
    assert [name for name, _ in grammar.tools] == names
    assert (grammar.must_call, grammar.parallel) == (must_call, parallel)
    assert read(**body).named_tool == (body.get("tool_choice") == NOW)


def test_free_tools_need_no_grammar() -> None:
    assert read(tools=TOOLS).grammar is None
    assert read(tools=TOOLS, tool_choice="auto", parallel_tool_calls=True).grammar is None


def test_an_answer_format_beside_tools_constrains_the_answer_without_calls() -> None:
    message = read(tools=TOOLS, response_format=JSON_ANSWER).grammar.message
    assert msgspec.json.decode(message.text, type=ToolGrammar).answer == SCHEMA
    error = refusal(tools=TOOLS, guided_regex="a+")
    assert error.param == "guided_regex"
