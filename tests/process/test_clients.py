"""Several keys on one real server: a hostile key does not delay, refuse or probe another one."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("hostile: one\nother: two\nother: three\nplain\n")
    flags = ("--api-key-file", str(keys), "--cache-isolation", "key", "--num-pages", "2048")
    with run_server(*flags, "--max-running-requests", "8", "--key-metrics") as running:
        yield running.wait_ready()


def post(server: ServerProcess, key: str, **body: object) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(
        server.url + "/v1/completions",
        json={"model": "minisgl-demo", **body},
        headers={"authorization": f"Bearer {key}"},
        timeout=patience(),
    )
    return answer.status_code, answer.json()


@contextlib.contextmanager
def open_call(server: ServerProcess, key: str, **body: object) -> Iterator[None]:
    """Send a call and read nothing; the client disconnects at the end of the block."""
    data = json.dumps({"model": "minisgl-demo", **body}).encode()
    parts = urlsplit(server.url)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {parts.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=patience()) as connection:
        connection.sendall(head.encode() + data)
        yield


def test_a_short_call_is_not_starved_by_1024_choices_of_another_key(server: ServerProcess) -> None:
    """8 calls of 128 choices starved another client for more than 8 s, and filled its queue."""
    flood = {"n": 128, "max_tokens": 1500, "ignore_eos": True}
    with contextlib.ExitStack() as calls:
        for i in range(8):
            calls.enter_context(open_call(server, "one", prompt=f"Count to {i}", **flood))
        wait_for(
            lambda: server.metrics()["key_requests_open{key=hostile}"] == 1024, "all its choices"
        )
        wait_for(lambda: server.metrics()["requests_running"] == 8, "the flood to fill the batch")
        for key in ("two", "three", "two"):
            assert post(server, key, prompt="a", max_tokens=1)[0] == 200
        counted = server.metrics()
        assert counted["key_requests_total{key=other}"] == 3
        # In order of arrival, 1,016 requests of the other key would have to end first.
        assert counted["key_requests_total{key=hostile}"] <= 8
        assert post(server, "one", prompt="x", n=128)[0] == 503
        assert server.metrics()["key_rejected_total{key=hostile}"] == 1
        assert post(server, "plain", prompt="x", max_tokens=1)[0] == 200
    wait_for(lambda: server.metrics()["key_requests_open{key=hostile}"] == 0, "the aborts")
    assert server.metrics()["key_requests_total{key=default}"] == 1


def test_a_key_does_not_find_the_prompts_of_another_one_in_the_cache(server: ServerProcess) -> None:
    prompt = "The password of the safe is a long sentence that one team alone knows. " * 8

    def cached(key: str, salt: str = "") -> int:
        _, answer = post(server, key, prompt=prompt, max_tokens=1, cache_salt=salt)
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("two") == 0
    assert cached("one") == 0, "another name"
    assert cached("three") > 0, "the same name"
    assert cached("plain") == 0
    assert cached("one", "other\n") == 0, "a salt cannot spell the name of another key"


def test_a_prompt_is_scored_once_for_all_choices(server: ServerProcess) -> None:
    """n = 16 computed and reported the log-probabilities of the prompt 16 times."""
    prompt = [*range(100, 600)]
    body = {"prompt": prompt, "n": 16, "echo": True, "logprobs": 5, "max_tokens": 2, "seed": 1}
    status, answer = post(server, "two", **body, ignore_eos=True)
    assert status == 200
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [len(choice["logprobs"]["tokens"]) for choice in choices] == [502] + [2] * 15
    echo = answer["choices"][0]["text"]
    for choice in choices[1:]:
        assert choice["logprobs"]["text_offset"][0] == choices[0]["logprobs"]["text_offset"][500]
        assert choice["text"][:500] == echo[:500]
    assert answer["usage"]["prompt_tokens"] == 500


def test_the_cost_of_a_call_is_bounded(server: ServerProcess) -> None:
    body = {"prompt": [1] * 1000, "n": 1024, "max_tokens": 3000}
    status, answer = post(server, "two", **body)
    assert status == 400
    assert "lower max_tokens, n or logprobs" in answer["error"]["message"]
    assert server.limits_exceeded()["max_call_tokens"] == 1


def test_a_body_with_too_many_values_is_refused(server: ServerProcess) -> None:
    """16 MiB of [[],[],...] in an ignored parameter took 2.6 s of the event loop."""
    status, _ = post(server, "two", prompt="x", metadata=[[]] * 200_000)
    assert status == 400
    assert server.limits_exceeded()["max_body_values"] == 1
