"""Harmony through the whole server, with the published template and models that recite answers."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from minisgl.tool_calls.formats.harmony import MARKERS
from tests.process.harness import ServerProcess, run_server
from tests.process.tiny_model import build_reciting_model

pytestmark = pytest.mark.process

TEMPLATE = Path(__file__).parents[1] / "data" / "templates" / "openai-gpt-oss-20b.jinja"
# The model's output, token by token. It begins after the token with which the prompt ends: that is
# "assistant", or " word" if a chat continues a final message.
CALL = ['{"city"', ': "Rom"}']
HEADER = ["<|channel|>", "commentary to=functions.weather ", "<|constrain|>", "json", "<|message|>"]
RECITAL = ["Ġword", "Ġcode", "<|end|>", "<|start|>", "assistant", *HEADER, *CALL, "<|call|>"]
THOUGHT = ["assistant", "<|channel|>", "analysis", "<|message|>", "Ġword", "Ġcode", "<|return|>"]
FINAL = ["assistant", "<|channel|>", "final", "<|message|>", "Ġword", "<|return|>"]
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
    "temperature": 0,
}


def build(folder: Path, recital: list[str]) -> str:
    folder.mkdir()
    build_reciting_model(folder, recital, list(dict.fromkeys([*MARKERS, *recital])))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["special"] = token["special"] or token["content"] in MARKERS
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(TEMPLATE, folder / "chat_template.jinja")
    return str(folder)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = build(tmp_path_factory.mktemp("calling") / "tiny", RECITAL)
    with run_server("--model", folder, "--num-pages", "128") as found:
        yield found.wait_ready()


def test_a_whole_answer_and_a_stream_have_the_same_call(server: ServerProcess) -> None:
    client = server.client()
    (choice,) = client.chat.completions.create(**REQUEST).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rom"}')
    with client.chat.completions.stream(**REQUEST) as stream:
        (streamed,) = stream.get_final_completion().choices
    assert streamed.finish_reason == "tool_calls"
    assert not streamed.message.content
    assert streamed.message.tool_calls is not None
    (same,) = streamed.message.tool_calls
    assert same.function.arguments == call.function.arguments


def test_a_tool_round_continues_with_the_result(server: ServerProcess) -> None:
    """The history with two calls and their results reaches the template, and the model answers."""
    client = server.client()
    message = client.chat.completions.create(**REQUEST).choices[0].message
    assert message.tool_calls is not None
    sent = message.model_dump(exclude_none=True)
    sent["tool_calls"].append({**sent["tool_calls"][0], "id": "other"})
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        for call in sent["tool_calls"]
    ]
    sent["content"], sent["reasoning_content"] = None, "I ask."
    history = [*REQUEST["messages"], sent, *results]
    (choice,) = client.chat.completions.create(**{**REQUEST, "messages": history}).choices
    assert choice.finish_reason == "tool_calls"


def test_a_call_cut_off_by_the_limit_keeps_what_was_sent(server: ServerProcess) -> None:
    limits = {3: None, 6: '{"city"'}
    for limit, arguments in limits.items():
        (choice,) = server.client().chat.completions.create(**REQUEST, max_tokens=limit).choices
        assert choice.finish_reason == "length"
        calls = choice.message.tool_calls
        assert (None if calls is None else calls[0].function.arguments) == arguments
        assert not choice.message.content


def test_an_answer_continues_a_final_message(server: ServerProcess) -> None:
    messages = [*REQUEST["messages"], {"role": "assistant", "content": "a word"}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    given = {**REQUEST, "messages": messages, "extra_body": more}
    (choice,) = server.client().chat.completions.create(**given).choices
    assert choice.message.content == " code"
    assert choice.message.tool_calls is not None


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": TOOL["function"]}])
def test_a_required_call_follows_its_schema(server: ServerProcess, choice: Any) -> None:
    if isinstance(choice, dict):
        choice = {"type": "function", "function": {"name": "weather"}}
    client = server.client()
    (found,) = client.chat.completions.create(**REQUEST, tool_choice=choice).choices
    assert found.message.tool_calls is not None
    (call,) = found.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments) == {"city": "Rom"}


def test_other_constraints_and_efforts_are_refused(server: ServerProcess) -> None:
    given = {key: value for key, value in REQUEST.items() if key != "tools"}
    for body, param in (
        ({"regex": "a+"}, "regex"),
        ({"reasoning_effort": "x"}, "reasoning_effort"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            server.client().chat.completions.create(**given, extra_body=body)
        assert caught.value.param == param


def test_analysis_is_reasoning(tmp_path: Path) -> None:
    folder = build(tmp_path / "tiny", THOUGHT)
    given = {key: value for key, value in REQUEST.items() if key != "tools"}
    with run_server("--model", folder, "--num-pages", "128") as server:
        client = server.wait_ready().client()
        (choice,) = client.chat.completions.create(**given, reasoning_effort="high").choices
        chunks = list(client.chat.completions.create(**given, stream=True))
    assert choice.message.reasoning_content == " word code"
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == (
        " word code"
    )


def test_a_schema_constrains_the_final_message(tmp_path: Path) -> None:
    folder = build(tmp_path / "tiny", FINAL)
    given = {key: value for key, value in REQUEST.items() if key != "tools"}
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": [1]}}}
    with run_server("--model", folder, "--num-pages", "128") as server:
        client = server.wait_ready().client()
        free = client.chat.completions.create(**given)
        constrained = client.chat.completions.create(**{**given, "response_format": schema})
    for answer, content in ((free, " word"), (constrained, "1")):
        (choice,) = answer.choices
        assert (choice.message.content, choice.finish_reason) == (content, "stop")
