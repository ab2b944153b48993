"""Tool calls through the whole server, with a model that recites text and a call."""

from collections.abc import Iterator
from typing import Any

import httpx
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
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
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
    server.client().chat.completions.create(**REQUEST)
    counted = httpx.get(f"{server.url}/metrics").text
    (line,) = (row for row in counted.splitlines() if row.startswith("minisgl_tool_calls_total"))
    assert 'tool_format="hermes"' in line
    assert float(line.split()[-1]) >= 1
