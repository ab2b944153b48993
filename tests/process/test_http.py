"""The server from the outside: the openai client, raw HTTP, disconnects, invalid input."""

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import zmq

from tests.patience import patience
from tests.process.harness import JSON_BODY, ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "Count: one two three é €."}]


@pytest.fixture(params=["stub", "real"])
def server(request: pytest.FixtureRequest) -> ServerProcess:
    found: ServerProcess = request.getfixturevalue(f"{request.param}_server")
    return found


def post(server: ServerProcess, path: str, body: object) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=patience())


@contextlib.contextmanager
def streaming(server: ServerProcess, **body: object) -> Iterator[httpx.Response]:
    body = {"model": "tiny", "prompt": "a b c d", "stream": True, **body}
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body, timeout=patience()
    ) as response:
        yield response


def test_an_idle_connection_stays_open(stub_server: ServerProcess) -> None:
    """uvicorn's default closes it after 5 s, and the next request of a proxy would then fail."""
    url = httpx.URL(stub_server.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=patience())
    connection.auto_open = 0
    connection.connect()
    for _ in range(2):
        connection.request("GET", "/livez")
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        connection.sock.settimeout(6.0)
        with pytest.raises(TimeoutError):
            connection.sock.recv(1)
        connection.sock.settimeout(patience())
    connection.close()


def test_chat_stream_equals_the_whole_answer(server: ServerProcess) -> None:
    client = server.client()
    options = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    pieces = list(
        client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[0].choices[0].delta.role == "assistant"
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"
    assert {(p.id, p.created, p.model, p.object) for p in pieces} == {
        (pieces[0].id, pieces[0].created, "tiny", "chat.completion.chunk")
    }
    assert pieces[-1].choices == []
    assert pieces[-1].usage is not None
    assert whole.usage is not None
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert whole.usage.prompt_tokens_details is not None
    assert whole.object == "chat.completion"
    assert whole.system_fingerprint


def test_openai_stream_helper_gets_its_final_completion(stub_server: ServerProcess) -> None:
    with stub_server.client().chat.completions.stream(
        model="tiny", messages=CHAT, stop="three"
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].finish_reason == "stop"
    assert str(final.choices[0].message.content).endswith("Count: one two ")


def test_completions_by_n_and_prompts(server: ServerProcess) -> None:
    answer = server.client().completions.create(
        model="tiny", prompt=["one two", "three"], n=2, max_tokens=3, echo=True, seed=7
    )
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert all(c.text.startswith("one two") for c in answer.choices[:2])
    assert all(c.text.startswith("three") for c in answer.choices[2:])
    single = server.client().completions.create(model="tiny", prompt="one two", max_tokens=3)
    other = server.client().completions.create(model="tiny", prompt="three", max_tokens=3)
    assert answer.usage is not None
    assert single.usage is not None
    assert other.usage is not None
    assert answer.usage.completion_tokens == 12
    prompts = single.usage.prompt_tokens + other.usage.prompt_tokens
    assert answer.usage.prompt_tokens == prompts, "each prompt counts once"


def test_token_id_prompt_is_echoed_as_text(stub_server: ServerProcess) -> None:
    ids = [40, 41, 42]
    answer = stub_server.client().completions.create(
        model="tiny", prompt=ids, max_tokens=3, echo=True
    )
    text = answer.choices[0].text
    assert text[: len(text) // 2] == text[len(text) // 2 :], "the stub repeats the prompt"


def test_stop_string_ends_text_and_usage(stub_server: ServerProcess) -> None:
    answer = stub_server.client().completions.create(
        model="tiny", prompt="alpha beta gamma delta", max_tokens=50, stop=["gam"]
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert "gam" not in choice.text
    assert choice.text.startswith("alpha beta")
    assert answer.usage is not None
    assert answer.usage.completion_tokens < 20


def test_models_and_unknown_routes(server: ServerProcess) -> None:
    client = server.client()
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("someone/else")
    assert missing.value.code == "model_not_found"
    for method, path, status in [
        ("GET", "/nowhere", 404),
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
    ]:
        answer = httpx.request(method, server.url + path, timeout=patience())
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


BAD = {
    "not json": (b"{", None),
    "not an object": (b"[1]", None),
    "nan": (b'{"model":"tiny","messages":[],"temperature":NaN}', None),
    "surrogate": (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', None),
    "deep": (b"[" * 100_000, None),
    "no model": ({"messages": CHAT}, "model"),
    "no messages": ({"model": "tiny"}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "role": ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].image_url",
    ),
    "negative max_tokens": ({"max_tokens": -1}, "max_tokens"),
    "zero max_tokens": ({"max_tokens": 0}, "max_tokens"),
    "huge top_k": ({"top_k": 2**40}, "top_k"),
    "bool as int": ({"max_tokens": True}, "max_tokens"),
    "huge seed": ({"seed": 2**64}, "seed"),
    "top_p zero": ({"top_p": 0}, "top_p"),
    "temperature": ({"temperature": 2.1}, "temperature"),
    "stop empty": ({"stop": ""}, "stop"),
    "stop too many": ({"stop": ["x"] * 17}, "stop"),
    "n": ({"n": 10_000_000}, "n"),
    "min above max": ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    "tools": ({"tools": [{"type": "function"}]}, "tools[0].function"),
    "format": ({"response_format": {"type": "xml"}}, "response_format.type"),
    "typo": ({"temprature": 0.5}, "temprature"),
    "template": ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    "stop id": ({"stop_token_ids": [10**8]}, "stop_token_ids"),
    "stream options": ({"stream_options": {"include_usage": True}}, "stream_options"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_chat_is_a_400_that_names_the_parameter(server: ServerProcess, name: str) -> None:
    """Each of these ended a process of mini-sglang, or had no response."""
    body, param = BAD[name]
    if isinstance(body, dict):
        if name not in ("no model", "no messages"):
            body = {"model": "tiny", "messages": CHAT, **body}
        body = json.dumps(body).encode()
    answer = httpx.post(
        server.url + "/v1/chat/completions", content=body, headers=JSON, timeout=patience()
    )
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert len(error["message"]) < 600
    good = server.client().chat.completions.create(
        model="tiny", messages=CHAT, max_tokens=2, temperature=0
    )
    assert good.usage is not None
    assert good.usage.completion_tokens == 2


@pytest.mark.parametrize(
    "prompt",
    ["", [], [""], [[]], [10**8], [[1, -1]], [True], {"a": 1}, 7, None, [1] * 3000, "x " * 60_000],
    ids=lambda prompt: str(prompt)[:12],
)
def test_bad_prompt_is_a_400(server: ServerProcess, prompt: object) -> None:
    answer = post(server, "/v1/completions", {"model": "tiny", "prompt": prompt})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith("prompt")


def test_prompt_too_long_has_its_code(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="tiny", prompt=[5] * 2048, max_tokens=1)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="tiny", prompt="a", max_tokens=5000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")


def test_unknown_model_is_a_404(server: ServerProcess) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().chat.completions.create(model="other", messages=CHAT)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


def test_body_over_the_cap_is_a_413(server: ServerProcess) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(21):
            yield b" " * 2**20

    for content in (b" " * (21 * 2**20), chunks()):
        with contextlib.suppress(httpx.WriteError):  # the server need not read it all
            url = server.url + "/v1/completions"
            answer = httpx.post(url, content=content, headers=JSON, timeout=patience())
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("given", ["abc-123", "x" * 129, "bad\tid", None])
def test_valid_request_id_is_echoed_and_any_other_replaced(
    stub_server: ServerProcess, given: str | None
) -> None:
    headers = {} if given is None else {"x-request-id": given}
    answer = httpx.get(stub_server.url + "/v1/models", headers=headers, timeout=patience())
    returned = answer.headers["x-request-id"]
    assert (returned == given) == (given == "abc-123")
    assert len(returned) <= 128


def test_disconnect_frees_the_pages(real_server: ServerProcess) -> None:
    """Otherwise pages and rows of aborted requests would block later requests."""
    for _ in range(5):
        with streaming(real_server, max_tokens=1500, ignore_eos=True) as response:
            next(response.iter_lines())
    for _ in range(3):
        with (
            socket.create_connection(tuple_of(real_server.url)) as raw,
            contextlib.suppress(TimeoutError),
        ):
            body = b'{"model":"tiny","prompt":"a b","max_tokens":1500,"ignore_eos":true}'
            head = b"POST /v1/completions HTTP/1.1\r\n" + JSON_BODY + b"content-length: %d\r\n\r\n"
            raw.sendall(head % len(body) + body)
            raw.settimeout(0.2)
            raw.recv(1)
    # 1,024 pages of 16 tokens: the next prompt needs pages of the aborted requests.
    assert wait_idle_cpu(real_server)
    done = real_server.client().completions.create(model="tiny", prompt=[9] * 1900, max_tokens=9)
    assert done.usage is not None


def tuple_of(url: str) -> tuple[str, int]:
    host, port = url.removeprefix("http://").split(":")
    return host, int(port)


def wait_idle_cpu(server: ServerProcess) -> bool:
    """Wait until the scheduler runs no more steps, so that its CPU time stays constant."""
    import psutil

    process = psutil.Process(server.child_pid("scheduler"))
    seen: list[float] = []

    def still() -> bool:
        seen.append(sum(process.cpu_times()[:2]))
        return len(seen) > 50 and seen[-1] - seen[-50] < 0.1

    return wait_for(still, "an idle scheduler")


@pytest.mark.parametrize("part", [b"", b'{"model":'], ids=["before the body", "in the body"])
def test_client_that_disconnects_while_sending_does_no_harm(
    stub_server: ServerProcess, part: bytes
) -> None:
    before = stub_server.stderr.count("Traceback")
    head = b"POST /v1/completions HTTP/1.1\r\n" + JSON_BODY + b"content-length: 999\r\n\r\n"
    with socket.create_connection(tuple_of(stub_server.url)) as raw:
        raw.sendall(head + part)
    assert stub_server.client().completions.create(model="tiny", prompt="a").choices
    assert stub_server.stderr.count("Traceback") == before


def test_failing_request_is_a_500_that_clients_do_not_retry(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), stub="refuse") as server:
        server.wait_ready()
        for stream in (False, True):
            body = {"model": "tiny", "prompt": "a", "stream": stream}
            answer = post(server, "/v1/completions", body)
            assert answer.status_code == 500, "the refusal comes before the status line"
            assert answer.headers["x-should-retry"] == "false"
            assert answer.json()["error"]["message"] == "no luck"


def test_requests_while_loading_are_503(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), stub="loading") as server:
        wait_for(lambda: server.status("/livez") == 200, "livez")
        assert server.status("/readyz") == server.status("/health") == 503
        answer = post(server, "/v1/completions", {"model": "tiny", "prompt": "a"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]


def test_garbage_on_the_sockets_is_dropped(stub_server: ServerProcess) -> None:
    """The sockets are private, and a frame that does not decode ends no process."""
    folder = stub_server.socket_folder()
    assert os.stat(folder).st_mode & 0o777 == 0o700
    for name in ("api", "tokenizer-0", "detokenizer", "grammars", "scheduler"):
        with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
            sender.connect(f"ipc://{folder}/{name}")
            for frame in (b"", b"\xff" * 99, b"\x81\xa4type\xa3foo", b"\x93\x01\x02\x03"):
                sender.send(frame)
            sender.close(linger=2000)
    answer = stub_server.client().completions.create(model="tiny", prompt="hello", max_tokens=1)
    assert answer.choices[0].finish_reason == "length"
