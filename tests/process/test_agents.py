"""Clients of Responses and Messages against a server: text, tools, reasoning, errors."""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from tests.patience import patience
from tests.process.agents import ANSWER, CALL, answer_of, run_scripted
from tests.process.harness import ServerProcess, run_server

pytestmark = pytest.mark.process

MODEL = "served"
KEY = "secret"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD = {"type": "function", "name": "add", "parameters": PARAMETERS, "strict": False}
FLAGS = ("--api-key", KEY, "--admin-api-key", "root", "--served-model-name", MODEL)
QUESTION = "What is 2 + 3?"
RULES = [
    ("<|im_start|>tool", ANSWER),
    (QUESTION, f"I add.\n{CALL}"),
    ("Count!", "one two three " * 600),
    ("", "Hello there."),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("scripted")
    with run_scripted(folder, RULES, *FLAGS) as found:
        yield found


@pytest.fixture
def ours(server: ServerProcess) -> openai.OpenAI:
    url = server.url + "/v1"
    return openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=patience())


@pytest.fixture
def theirs(server: ServerProcess) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=patience())


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_with_responses(ours: openai.OpenAI, stream: bool) -> None:
    given: Any = {"model": MODEL, "tools": [ADD, {"type": "web_search"}], "store": True}

    history: Any = [{"role": "user", "content": QUESTION}]
    first = answer_of(ours.responses, stream, input=history, **given)
    assert first.output_text == "I add."
    call = first.output[-1]
    assert (call.type, call.name) == ("function_call", "add")
    assert json.loads(call.arguments) == {"a": 2, "b": 3}
    assert first.store is False  # type: ignore[attr-defined]
    # openai-agents sends the items of an answer back as they are.
    history += [item.model_dump(exclude={"parsed_arguments"}) for item in first.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    second = answer_of(ours.responses, stream, input=history, **given)
    assert second.output_text == ANSWER
    assert second.status == "completed"
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tool_round_with_messages(theirs: anthropic.Anthropic, stream: bool) -> None:
    tool: Any = {"name": "add", "input_schema": PARAMETERS}
    given: Any = {"model": MODEL, "max_tokens": 64, "tools": [tool], "system": "Use tools."}

    history: Any = [{"role": "user", "content": QUESTION}]
    first = answer_of(theirs.messages, stream, messages=history, **given)
    text, call = first.content
    assert (text.text, first.stop_reason) == ("I add.", "tool_use")
    assert (call.name, call.input) == ("add", {"a": 2, "b": 3})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "5"}
    history += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result]},
    ]
    second = answer_of(theirs.messages, stream, messages=history, **given)
    assert (second.content[0].text, second.stop_reason) == (ANSWER, "end_turn")
    counted = theirs.messages.count_tokens(
        model=MODEL, messages=history, tools=[tool], system="Use tools."
    )
    assert counted.input_tokens == second.usage.input_tokens


def test_stop_sequence_limit_and_continuation(theirs: anthropic.Anthropic) -> None:
    def ask(*history: Any, **more: Any) -> Any:
        given = {"max_tokens": 64, **more}
        return theirs.messages.create(model=MODEL, messages=list(history), **given)

    hello = {"role": "user", "content": "Hi!"}
    stopped = ask(hello, stop_sequences=["zebra", " there"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " there")
    assert stopped.content[0].text == "Hello"
    cut = ask(hello, max_tokens=1)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 1)
    begun = {"role": "assistant", "content": "Well,"}
    plain = ask(hello).usage.input_tokens
    counted = theirs.messages.count_tokens(model=MODEL, messages=[hello, begun])  # type: ignore[list-item]
    assert plain < counted.input_tokens < plain + 4, "the last message has no end"


def test_errors_have_the_class_of_the_client(
    server: ServerProcess, ours: openai.OpenAI, theirs: anthropic.Anthropic
) -> None:
    with pytest.raises(openai.BadRequestError, match="send the whole history in input"):
        ours.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    with pytest.raises(openai.NotFoundError):
        ours.responses.create(model="other", input="hi")
    hello: Any = [{"role": "user", "content": "Hi!"}]
    with pytest.raises(anthropic.NotFoundError):
        theirs.messages.create(model="other", max_tokens=1, messages=hello)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        theirs.messages.create(model=MODEL, max_tokens=0, messages=hello)
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=MODEL, max_tokens=1, messages=hello)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_aborted_stream_ends_with_an_error(server: ServerProcess, path: str) -> None:
    name = "input" if path == "/v1/responses" else "messages"
    body = {"model": MODEL, "stream": True, name: [{"role": "user", "content": "Count!"}]}
    if name == "messages":
        body["max_tokens"] = 5000
    headers = {"x-api-key": KEY, "x-request-id": "counting"}
    with httpx.stream(
        "POST", server.url + path, json=body, headers=headers, timeout=patience()
    ) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines) in ("event: response.created", "event: message_start")
        root = {"authorization": "Bearer root"}
        done = httpx.post(server.url + "/abort", json={"request_id": "counting"}, headers=root)
        assert done.json() == {"aborted": 1}
        *_, last = [line for line in lines if line.startswith("data: ")]
    event = json.loads(last.removeprefix("data: "))
    assert event["type"] == ("response.failed" if name == "input" else "error")
    error = event["response"]["error"] if name == "input" else event["error"]
    assert error["message"] == "this request was aborted by an operator"


class Sum(BaseModel, extra="forbid"):
    result: int = Field(ge=0, le=99)
    is_even: bool


@pytest.fixture(scope="module")
def demo() -> Iterator[ServerProcess]:
    """The demo model, whose engine enforces constraints."""
    with run_server("--num-pages", "256") as found:
        yield found.wait_ready()


def test_structured_output_of_responses(demo: ServerProcess) -> None:
    client = demo.client()
    given: Any = {"model": "minisgl-demo", "input": QUESTION, "text_format": Sum}
    assert isinstance(client.responses.parse(**given).output_parsed, Sum)
    with client.responses.stream(**given) as events:
        assert isinstance(events.get_final_response().output_parsed, Sum)


def test_structured_output_of_messages(demo: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)
    answer = client.messages.create(
        model="minisgl-demo",
        max_tokens=64,
        messages=[{"role": "user", "content": QUESTION}],
        output_config={"format": {"type": "json_schema", "schema": Sum.model_json_schema()}},
    )
    assert isinstance(Sum.model_validate_json(answer.content[0].text), Sum)  # type: ignore[union-attr]


EXPRESSION = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
PRODUCT = [{"role": "user", "content": "What is 12 * 34?"}]


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_demo_model_calls_a_tool_by_responses(demo: ServerProcess, choice: str) -> None:
    client = demo.client()
    tool = {"type": "function", "name": "calculate", "parameters": EXPRESSION, "strict": False}
    given: Any = {"model": "minisgl-demo", "tools": [tool]}
    with client.responses.stream(input=PRODUCT, tool_choice=choice, **given) as events:
        (call,) = events.get_final_response().output
    assert (call.type, json.loads(call.arguments)) == ("function_call", {"expression": "12 * 34"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "408"}
    history: Any = [*PRODUCT, call.model_dump(exclude={"parsed_arguments"}), output]
    assert client.responses.create(input=history, **given).output_text == "The result is 408."


@pytest.mark.parametrize("choice", ["auto", "any"])
def test_demo_model_calls_a_tool_by_messages(demo: ServerProcess, choice: str) -> None:
    client = anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0)
    tool = {"name": "calculate", "input_schema": EXPRESSION}
    given: Any = {"model": "minisgl-demo", "max_tokens": 64, "tools": [tool]}
    chosen: Any = {"type": choice, "disable_parallel_tool_use": True}
    history: Any = [*PRODUCT]
    with client.messages.stream(messages=history, tool_choice=chosen, **given) as events:
        first = events.get_final_message()
    (call,) = first.content
    assert (call.type, first.stop_reason) == ("tool_use", "tool_use")
    assert call.input == {"expression": "12 * 34"}  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "408"}  # type: ignore[union-attr]
    history += [{"role": "assistant", "content": first.content}]
    history += [{"role": "user", "content": [result]}]
    answer: Any = client.messages.create(messages=history, **given)
    assert answer.content[0].text == "The result is 408."
