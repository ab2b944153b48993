"""Structured output through the HTTP API, with the demo model and OpenAI's client."""

import json
import re
from collections.abc import Iterator
from enum import Enum
from itertools import cycle
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from tests.patience import patience
from tests.process.harness import ServerProcess, run_server

pytestmark = pytest.mark.process

MODEL = "minisgl-demo"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "ages": {"type": "array", "items": {"enum": [1, 22, 99]}, "maxItems": 3},
    },
    "required": ["name", "ages"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
# Bodies that ask for the same constraint, and the regex that the answer matches.
NUMBER, WORD = r"[1-9][0-9]{0,3}", "(yes|no)"
FORMS: list[tuple[dict[str, Any], str | None]] = [
    ({"response_format": FORMAT}, None),
    ({"structured_outputs": {"json": SCHEMA}}, None),
    ({"structured_outputs": {"json": json.dumps(SCHEMA), "whitespace_pattern": " ?"}}, None),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, None),
    ({"guided_json": SCHEMA}, None),
    ({"structured_outputs": {"regex": NUMBER}}, NUMBER),
    ({"guided_regex": NUMBER}, NUMBER),
    ({"regex": NUMBER}, NUMBER),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, WORD),
    ({"guided_choice": ["yes", "no"]}, WORD),
    ({"structured_outputs": {"grammar": 'start: "yes" | "no"'}}, WORD),
    ({"guided_grammar": 'root ::= "yes" | "no"'}, WORD),
    ({"ebnf": 'root ::= "yes" | "no"'}, WORD),
]
PROMPTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "What is 12 + 30?"}]},
    "/v1/completions": {"prompt": "one two"},
    "/generate": {"input_ids": [40, 41, 42]},
}


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Node(BaseModel):
    color: Color
    size: int = Field(ge=1, le=50)
    next: "Node | None"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_server("--num-pages", "512") as found:
        yield found.wait_ready()


def post(server: ServerProcess, path: str, **body: Any) -> httpx.Response:
    given = {"model": MODEL, "max_tokens": 400, "temperature": 1, "seed": 3, **body}
    return httpx.post(server.url + path, json=given, timeout=patience())


def check(text: str, pattern: str | None) -> None:
    if pattern is None:
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert re.fullmatch(pattern, text), text


# All paths share these fields (GenerationBody): each form has one path in turn, the first has all.
@pytest.mark.parametrize(
    ("path", "form", "pattern"),
    [
        *((path, *form) for path, form in zip(cycle(PROMPTS), FORMS, strict=False)),
        *((path, *FORMS[0]) for path in [*PROMPTS][1:]),
    ],
)
def test_every_form_constrains_every_choice(
    server: ServerProcess, path: str, form: dict[str, Any], pattern: str | None
) -> None:
    answer = post(server, path, **PROMPTS[path], **form, n=2)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        check(choice["message"]["content"] if "message" in choice else choice["text"], pattern)


@pytest.mark.parametrize("logprobs", [False, True])
def test_stream_is_constrained_as_the_whole_answer(server: ServerProcess, logprobs: bool) -> None:
    """With log-probabilities, no token is forced: each comes from a step of its own."""
    client = server.client()
    pieces = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        response_format=FORMAT,  # type: ignore[arg-type]
        stream=True,
        temperature=0,
        max_tokens=400,
        logprobs=logprobs,
    )
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_json_object_is_an_object(server: ServerProcess) -> None:
    answer = post(
        server,
        "/v1/chat/completions",
        **PROMPTS["/v1/chat/completions"],
        response_format={"type": "json_object"},
        max_tokens=12,
    )
    assert answer.json()["choices"][0]["message"]["content"].startswith("{")


def test_openai_client_parses_a_recursive_pydantic_model(server: ServerProcess) -> None:
    with server.client() as client:
        found = client.chat.completions.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "A list, please."}],
            response_format=Node,
            temperature=1,
            seed=1,
            max_tokens=3000,
        )
    assert isinstance(found.choices[0].message.parsed, Node)


def test_openai_client_names_the_fault(server: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    given = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with server.client() as client, pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "x"}],
            response_format=given,  # type: ignore[arg-type]
        )
    assert caught.value.param == "response_format.json_schema.schema"
    assert "/properties/a/uniqueItems: Unimplemented keys" in str(caught.value)


DEEP: dict[str, Any] = {}
for _ in range(70):
    DEEP = {"items": DEEP}


@pytest.mark.parametrize(
    ("limit", "schema"),
    [
        ("max_grammar_chars", {"enum": ["x" * 300_000]}),
        ("max_grammar_chars", {"enum": list(range(500_000))}),
        ("max_grammar_depth", DEEP),
        ("max_enum_entries", {"enum": list(range(10_001))}),
        ("max_grammar_seconds", {"properties": {f"p{i}": True for i in range(9_000)}}),
    ],
)
def test_schema_over_a_limit_is_refused_and_counted(
    server: ServerProcess, limit: str, schema: dict[str, Any]
) -> None:
    before = server.limits_exceeded()
    path = "/v1/completions"
    answer = post(server, path, **PROMPTS[path], guided_json=schema)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "guided_json")
    assert server.limits_exceeded() == {**before, limit: before[limit] + 1}


def test_requests_are_counted_by_kind(server: ServerProcess) -> None:
    name = "structured_requests_total{kind=regex}"
    before = server.metrics()[name]
    path = "/v1/completions"
    assert post(server, path, **PROMPTS[path], regex="[a-c]", n=3).status_code == 200
    assert post(server, path, **PROMPTS[path], regex="[a-c").status_code == 400
    assert server.metrics()[name] == before + 1
