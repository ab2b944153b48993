"""Tool calls through the whole server, with a model that recites text and a call."""

import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.process.harness import ServerProcess, run_server
from tests.process.tiny_model import build_reciting_model

pytestmark = pytest.mark.process

# The model's output after the last line break of the prompt, token by token.
CALL = ["<tool_call>", '{"name": "weather", ', '"arguments": {"city"', ': "Rom"}}', "</tool_call>"]
RECITAL = ["Ċ", "Ġword", "Ġcode", *CALL, "<|im_end|>"]
TEMPLATE = """
{%- if tools %}{{ tools | tojson + '\n' }}{% endif %}
{%- for message in messages %}
{{- message.role + ':\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}
{%- endfor %}
{{- '\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ 'assistant:\n' }}{% endif -%}"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rom", "Bern"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
REQUEST: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("calling") / "tiny"
    folder.mkdir()
    build_reciting_model(folder, RECITAL, CALL)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with run_server("--model", str(folder), "--num-pages", "64") as found:
        yield found.wait_ready()


@pytest.fixture(scope="module")
def tools_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model with random weights whose template knows tools."""
    folder = tmp_path_factory.mktemp("random") / "tiny"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with run_server("--model", str(folder), "--num-pages", "1024") as found:
        yield found.wait_ready()


def test_a_whole_answer_and_a_stream_have_the_same_call(server: ServerProcess) -> None:
    client = server.client()
    (choice,) = client.chat.completions.create(**REQUEST).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == " word code"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rom"}')

    with client.chat.completions.stream(**REQUEST) as stream:
        names = [event.name for event in stream if event.type.startswith("tool_calls")]
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.content == " word code"
    assert streamed.message.tool_calls is not None
    (same,) = streamed.message.tool_calls
    assert same.function.arguments == call.function.arguments
    assert set(names) == {"weather"}


def test_a_tool_round_continues_with_the_result(server: ServerProcess) -> None:
    """The history with the call and the result reaches the template, and the model answers."""
    client = server.client()
    message = client.chat.completions.create(**REQUEST).choices[0].message
    assert message.tool_calls is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
    history = [*REQUEST["messages"], message.model_dump(exclude_none=True), result]
    (choice,) = client.chat.completions.create(**{**REQUEST, "messages": history}).choices
    assert choice.finish_reason == "tool_calls"


def test_a_call_cut_off_by_the_limit_keeps_what_was_sent(server: ServerProcess) -> None:
    (choice,) = server.client().chat.completions.create(**REQUEST, max_tokens=5).choices
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].function.arguments == '{"city"'


def test_without_callable_tools_the_call_is_text(server: ServerProcess) -> None:
    plain = {key: value for key, value in REQUEST.items() if key != "tools"}
    for body in (plain, {**plain, "tools": []}, {**REQUEST, "tool_choice": "none"}):
        (choice,) = server.client().chat.completions.create(**body).choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == " word code" + "".join(CALL)
        assert choice.message.tool_calls is None


def test_the_format_is_named_and_calls_are_counted(server: ServerProcess) -> None:
    before = server.metrics()["tool_calls_total{tool_format=hermes}"]
    server.client().chat.completions.create(**REQUEST)
    assert server.metrics()["tool_calls_total{tool_format=hermes}"] == before + 1


def call_of(server: ServerProcess, **body: Any) -> list[Any]:
    """The calls of an answer that has nothing but complete calls."""
    (choice,) = server.client().chat.completions.create(**{**REQUEST, **body}).choices
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    return [choice.finish_reason, *choice.message.tool_calls]


def test_a_named_tool_is_called_once_and_the_reason_is_stop(server: ServerProcess) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    reason, call = call_of(server, tool_choice=named)
    assert reason == "stop"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_required_and_strict_tools_follow_their_schema(server: ServerProcess) -> None:
    reason, call = call_of(server, tool_choice="required", parallel_tool_calls=False)
    assert reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    strict = {**TOOL["function"], "strict": True}
    tools = [{"type": "function", "function": strict}]
    body = {**REQUEST, "tools": tools, "parallel_tool_calls": False}
    (choice,) = server.client().chat.completions.create(**body).choices
    assert choice.message.content == " word code"
    assert choice.message.tool_calls is not None


class Weather(pydantic.BaseModel):
    city: Literal["Rom", "Bern"]


@pytest.mark.parametrize("stream", [False, True])
def test_openai_helpers_parse_the_arguments_of_a_strict_tool(
    server: ServerProcess, stream: bool
) -> None:
    """The model begins a call by itself, and the grammar holds for the rest of the answer."""
    tools = [openai.pydantic_function_tool(Weather, name="weather")]
    body = {**REQUEST, "tools": tools, "parallel_tool_calls": False}
    completions = server.client().chat.completions
    if stream:
        with completions.stream(**body) as events:
            answer = events.get_final_completion()
    else:
        answer = completions.parse(**body)
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls, "the model begins a call"
    assert all(isinstance(call.function.parsed_arguments, Weather) for call in calls)


def test_an_unsupported_schema_is_a_400_that_names_it(server: ServerProcess) -> None:
    parameters = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        server.client().chat.completions.create(
            **{**REQUEST, "tools": [{"type": "function", "function": function}]}
        )
    assert caught.value.param == "tools"


NUMBERS = {"type": "array", "maxItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 9}}
SMALL = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "values": NUMBERS},
    "required": ["unit", "values"],
    "additionalProperties": False,
}


@pytest.mark.slow
@pytest.mark.parametrize("answers", [50, pytest.param(1000, marks=pytest.mark.proof)])
def test_random_weights_call_tools_when_they_must(
    answers: int, tools_server: ServerProcess
) -> None:
    """Each answer of a random model that ends by itself is calls that validate."""
    tool = {"type": "function", "function": {"name": "measure", "parameters": SMALL}}
    complete = 0
    seeds = itertools.count()
    while complete < answers:
        seed = next(seeds)
        answer = tools_server.client().chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": f"hi {seed}"}],
            tools=[tool],
            tool_choice="required",
            seed=seed,
            n=50,
            max_tokens=300,
        )
        for choice in answer.choices:
            if choice.finish_reason == "length":
                continue
            complete += 1
            assert choice.finish_reason == "tool_calls"
            assert choice.message.content is None
            assert choice.message.tool_calls
            for call in choice.message.tool_calls:
                assert call.function.name == "measure"
                jsonschema.validate(json.loads(call.function.arguments), SMALL)
    assert next(seeds) * 25 <= answers, "most answers end by themselves"
