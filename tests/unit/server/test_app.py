"""The application with its middleware over ASGI, without any other process."""

import asyncio
import json
import time
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minisgl.core import FinishReason
from minisgl.message.messages import AddReq, Ready
from minisgl.request.convert import RequestConverter
from minisgl.server import routes
from minisgl.server.answer.openai import ResponseWriter
from minisgl.server.app import build_app
from minisgl.server.observe.lifecycle import Lifecycle
from minisgl.server.pages import PAGE_PATHS
from minisgl.settings import ServerConfig
from minisgl.settings.keys import key_hashes
from tests.examples import examples
from tests.unit.server.fakes import CONFIG, FACTS, World


class FakeService:
    """A ready service with a `World` in place of the worker processes."""

    def __init__(self, world: World, config: ServerConfig = CONFIG) -> None:
        self.config = config
        self.engine = world.engine
        self.lifecycle = Lifecycle(frozenset({"scheduler"}))
        self.lifecycle.on_ready(Ready(role="scheduler", facts=FACTS))
        self.stats = None


async def answer_all(world: World) -> None:
    """Answer every tokenize request, and each choice of an AddReq with two updates."""
    done: set[int] = set()
    while True:
        await asyncio.sleep(0)
        world.answer()
        for message in [m for m in world.scheduler.sent if isinstance(m, AddReq)]:
            for uid in {*range(message.uid, message.uid + message.count)} - done:
                done.add(uid)
                world.update(uid, "hé")
                await asyncio.sleep(0)
                world.update(uid, "llo", completion_tokens=2, finish=FinishReason.LENGTH)


def call(
    method: str, path: str, hangs: bool = False, config: ServerConfig = CONFIG, **options: Any
) -> httpx.Response:
    async def main() -> httpx.Response:
        world = World()
        service = FakeService(world, config)
        if hangs:
            service.lifecycle.hung = service.lifecycle.stalled = "scheduler"
        engine = asyncio.create_task(answer_all(world))
        transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.request(method, path, **options)
        engine.cancel()
        assert world.is_empty
        return answer

    return asyncio.run(main())


def test_incomplete_body_at_the_end_of_the_server_is_a_503_with_retry_after() -> None:
    """A drain does not wait for an incomplete body. uvicorn cancels the handler that reads it."""

    async def main() -> list[Any]:
        parts = iter([{"type": "http.request", "body": b"{", "more_body": True}])
        cut, sent = asyncio.Event(), []

        async def receive() -> Any:
            found = next(parts, None)
            if found is None:
                cut.set()
                await asyncio.Event().wait()
            return found

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
        app = build_app(FakeService(World()))
        task = asyncio.create_task(app({**scope, "query_string": b""}, receive, send))
        await cut.wait()
        task.cancel()
        await task
        return sent

    start, body = asyncio.run(main())
    assert start["status"] == 503
    assert (b"retry-after", b"1") in start["headers"]
    assert json.loads(body["body"])["error"]["code"] == "not_ready"


def test_tokenize_requests_count_in_the_queue_and_have_its_time_limit() -> None:
    """Regression: requests waited for the tokenizers without a limit of number or time."""

    async def main() -> list[str]:
        world = World(max_queued_reqs=1)
        transport = httpx.ASGITransport(build_app(FakeService(world)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            first = asyncio.create_task(client.post("/tokenize", json={"prompt": "a"}))
            while not world.tokenizers[0].sent:
                await asyncio.sleep(0)
            more = await client.post("/detokenize", json={"tokens": [1]})
            world.engine.end_overdue(time.monotonic() + 301)
            late = await first
        world.answer()
        assert world.is_empty
        return [answer.json()["error"]["code"] for answer in (more, late)]

    assert asyncio.run(main()) == ["overloaded", "deadline_exceeded"]


def events(answer: httpx.Response) -> list[Any]:
    """The events, parsed, except [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.split("\n\n")
    assert blocks[-1] == ""
    data = [block.removeprefix("data: ") for block in blocks[:-1]]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


def test_chat_answer_has_exactly_the_documented_fields() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    answer = call("POST", "/v1/chat/completions", json=body).json()
    assert answer.pop("id").startswith("chatcmpl-")
    assert isinstance(answer.pop("created"), int)
    assert answer.pop("system_fingerprint").startswith("minisgl-")
    assert answer == {
        "object": "chat.completion",
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "héllo", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


@pytest.mark.parametrize("include_usage", [False, True])
def test_chat_stream_has_role_texts_finish_usage_done(include_usage: bool) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": include_usage},
    }
    answer = call("POST", "/v1/chat/completions", json=body)
    assert answer.headers["x-accel-buffering"] == "no"
    *chunks, done = events(answer)
    assert done == "[DONE]"
    if include_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["total_tokens"] == 3
    assert all(("usage" in chunk) == include_usage for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in choices) == "héllo"
    assert choices[-1] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
    }


def test_completions_stream_echoes_each_prompt() -> None:
    body = {"model": "m", "prompt": ["a", "b"], "n": 2, "echo": True, "stream": True}
    chunks = events(call("POST", "/v1/completions", json=body))[:-1]
    texts = ["", "", "", ""]
    for chunk in chunks:
        assert chunk["object"] == "text_completion"
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == ["ahéllo", "ahéllo", "bhéllo", "bhéllo"]


def test_echo_alone_streams_the_prompt_ids_too() -> None:
    """Regression: the stream of a call with max_tokens 0 lacked the ids of the whole answer."""
    body = {"model": "m", "prompt": "a", "echo": True, "max_tokens": 0, "return_token_ids": True}
    (whole,) = call("POST", "/v1/completions", json=body).json()["choices"]
    assert (whole["prompt_token_ids"], whole["token_ids"]) == ([1], [])
    chunks = events(call("POST", "/v1/completions", json={**body, "stream": True}))[:-1]
    found = [c["choices"][0] for c in chunks if "token_ids" in c["choices"][0]]
    assert [(c["prompt_token_ids"], c["token_ids"]) for c in found] == [([1], [])]


def test_bug_in_a_stream_becomes_an_error_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(shape: ResponseWriter, choice: object) -> bytes:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(ResponseWriter, "last_chunk", fail)
    *_, error, done = events(
        call("POST", "/v1/completions", json={"model": "m", "prompt": "a", "stream": True})
    )
    assert (error["error"]["code"], done) == ("internal_error", "[DONE]")
    assert "secret" not in error["error"]["message"]


@pytest.mark.parametrize(
    ("path", "hangs", "status"),
    [
        ("/livez", False, 200),
        ("/livez", True, 503),
        ("/readyz", True, 503),
        ("/health", False, 200),
    ],
)
def test_probes(path: str, hangs: bool, status: int) -> None:
    assert call("GET", path, hangs=hangs).status_code == status
    assert call("HEAD", path, hangs=hangs).status_code == status


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/playground", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("TRACE", "/livez", 405, "method_not_allowed"),
    ],
)
def test_other_paths_and_methods_have_nested_errors(
    method: str, path: str, status: int, code: str
) -> None:
    answer = call(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


KEYED = msgspec.structs.replace(CONFIG, api_key_hashes=key_hashes(["sesame"], None))


def test_pages_need_no_key_and_the_openapi_document_does() -> None:
    for path in PAGE_PATHS:
        answer = call("GET", path, config=KEYED)
        assert answer.status_code == 200, path
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert call("GET", "/openapi.json", config=KEYED).status_code == 401
    headers = {"authorization": "Bearer sesame"}
    document = call("GET", "/openapi.json", config=KEYED, headers=headers).json()
    operations = [o for path in document["paths"].values() for o in path.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids) == 24


@pytest.mark.parametrize(
    "path", ["/docs/NOTICE", "/docs/..%2fapp.py", "/playground/README.md", "/playground/..%2f.env"]
)
def test_other_files_beside_the_pages_are_not_served(path: str) -> None:
    assert call("GET", path, config=KEYED).status_code in (401, 404)
    assert call("GET", path).status_code == 404


@pytest.mark.parametrize("setting", ["no_playground", "render_only"])
def test_playground_can_be_switched_off(setting: str) -> None:
    """A server with --render-only answers no call of the page, so it has no page either."""
    config = msgspec.structs.replace(CONFIG, **{setting: True})
    assert call("GET", "/").headers["content-type"] == "text/html; charset=utf-8"
    for path in ("/", "/playground/app.js"):
        assert call("GET", path, config=config).status_code == 404
    assert call("GET", "/docs", config=config).status_code == 200


def test_models_have_anthropics_form_for_its_clients() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    listed = call("GET", "/v1/models", headers=headers)
    body = listed.json()
    assert (body["first_id"], body["last_id"], body["has_more"]) == ("m", "org/m", False)
    for entry in body["data"]:
        info = anthropic.types.ModelInfo.model_validate(entry)
        assert (info.type, info.display_name, info.max_input_tokens) == ("model", info.id, 100)
        one = call("GET", f"/v1/models/{info.id}", headers=headers)
        assert one.json() == entry
    assert call("GET", "/v1/models").json()["object"] == "list"


def test_model_card_has_the_defaults_of_the_model() -> None:
    facts = msgspec.structs.replace(FACTS, sampling_defaults={"temperature": 0.6, "top_k": 20})
    converter = RequestConverter(CONFIG)
    found = converter.sampling_defaults(facts)
    assert (found["temperature"], found["top_k"], found["top_p"]) == (0.6, 20, 1.0)
    plain = RequestConverter(msgspec.structs.replace(CONFIG, ignore_generation_config=True))
    assert plain.sampling_defaults(facts) == plain.sampling_defaults(FACTS)
    (card,) = call("GET", "/v1/models").json()["data"][:1]
    assert card["sampling_defaults"] == converter.sampling_defaults(FACTS)


@pytest.mark.parametrize(
    "path", ["/abort%0A", "/docs%0A", "/livez%0A", "/v1/models/m%0A", "/livez/", "/v1/models%0A"]
)
def test_paths_match_to_the_last_character(path: str) -> None:
    """The pattern of a route ends in `$`, which a newline may follow."""
    for method in ("GET", "POST"):
        answer = call(method, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_answer_to_a_wrong_method_lists_the_right_ones() -> None:
    assert call("POST", "/v1/models").headers["allow"].split(", ") in (
        ["GET", "HEAD"],
        ["HEAD", "GET"],
    )
    assert call("HEAD", "/v1/completions").headers["allow"] == "POST"


def test_model_ids_may_have_slashes() -> None:
    assert call("GET", "/v1/models/org/m").json()["id"] == "org/m"


def test_declared_body_over_the_cap_is_refused_before_it_is_read() -> None:
    for length in (str(2**40), f"{2**40:05000}"):
        answer = call(
            "POST", "/v1/completions", headers={**JSON, "content-length": length}, content=b""
        )
        assert answer.status_code == 413
        assert answer.headers["x-request-id"]


JSON = {"content-type": "application/json"}
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
BODIES = st.binary(max_size=30) | st.dictionaries(
    st.sampled_from(["model", "prompt", "messages", "n", "stream", "max_tokens", "stop", "seed"]),
    VALUES | st.lists(VALUES, max_size=3) | st.just("m"),
).map(lambda body: json.dumps(body).encode("utf-8", "surrogatepass"))


@settings(max_examples=examples(60))
@given(
    st.sampled_from(["GET", "POST", "PUT", "OPTIONS"]),
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/models/%00", "/livez", "//"]),
    BODIES,
)
def test_no_request_gets_a_5xx_and_every_error_is_nested(
    method: str, path: str, body: bytes
) -> None:
    answer = call(method, path, content=body, headers=JSON)
    assert answer.status_code < 500
    if answer.status_code >= 400:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_texts_of_tokens_are_refused_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the texts of 8 MiB would hold the event loop for 10 s."""
    body = {"prompt": "a", "return_token_strs": True}
    assert call("POST", "/tokenize", json=body).status_code == 200
    monkeypatch.setattr(routes, "_MAX_TOKEN_STRS", 0)
    assert call("POST", "/tokenize", json={"prompt": "a"}).status_code == 200
    answer = call("POST", "/tokenize", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "return_token_strs"
    assert error["message"].startswith("prompt has 1 tokens; return_token_strs is for at most 0")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ["a", [1] * 90]}, "prompt[1]"),
        ({"prompt": [1] * 40, "max_tokens": 41}, "max_tokens"),
    ],
)
def test_render_refuses_the_calls_that_the_engine_refuses(body: dict[str, Any], param: str) -> None:
    answers = [
        call("POST", path, json={"model": "m", **body})
        for path in ("/v1/completions", "/v1/completions/render")
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].json() == answers[1].json()
    assert answers[1].json()["error"]["param"] == param
