"""Each limit of docs/api.md refuses at once with its status, and is counted by its name."""

import contextlib
import os
import resource
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from minisgl.message.messages import Ready
from minisgl.message.queues import Sender, endpoint
from tests.contract.api_tables import LIMIT_NAMES
from tests.patience import patience
from tests.process.harness import JSON_BODY, ServerProcess, run_server, wait_for
from tests.process.stub_scheduler import FACTS

pytestmark = pytest.mark.process

TEMPLATE = """
{%- if messages[0].content == 'slow' -%}
{%- set n = 9999 * messages | length -%}
{{- [[[0] * n] * n] * n == [[[0.0] * n] * n] * n -}}
{%- endif -%}
{{ messages[0].content * (3000000 if messages[0].content == 'long' else 1) }}"""
SMALL = {
    "--max-choices": "8",
    "--max-logprobs": "2",
    "--max-logit-bias": "2",
    "--max-messages": "2",
    "--max-prompt-chars": "3000",
    "--max-body-bytes": "10000",
    "--template-timeout": "0.1",
    "--max-request-time": "2",
    "--max-call-tokens": "4000",
}
USER = {"role": "user", "content": "hi"}
# A request that exceeds this limit and no other.
OVER: dict[str, dict[str, Any]] = {
    "max_prompts": {"prompt": ["a"] * 9},
    "max_n": {"n": 9},
    "max_choices": {"prompt": ["a"] * 3, "n": 3},
    "max_stop_strings": {"stop": ["a"] * 17},
    "max_stop_chars": {"stop": "a" * 257},
    "max_stop_token_ids": {"stop_token_ids": [1] * 129},
    "max_logprobs": {"logprobs": 3},
    "max_logit_bias": {"logit_bias": {"1": 1, "2": 1, "3": 1}},
    "max_prompt_chars": {"prompt": "a" * 3001},
    "max_call_tokens": {"n": 8, "max_tokens": 600},
    "max_seq_len": {"prompt": [5] * 2049},
    "max_body_bytes": {"prompt": "a" * 10_000},
    "max_messages": {"messages": [USER] * 3},
    "template_timeout_s": {"messages": [{**USER, "content": "slow"}]},
    "max_template_chars": {"messages": [{**USER, "content": "long"}]},
}
BY_THE_ENGINE = {"max_queued_reqs", "max_queued_tokens", "max_wait_s", "max_total_s"}
IN_TEST_CLIENTS = {"max_key_reqs", "max_key_tokens", "max_body_values"}
BY_ALL_TOGETHER = {"max_bodies_bytes"}
IN_TEST_STRUCTURED = {
    "max_grammar_chars",
    "max_grammar_depth",
    "max_enum_entries",
    "max_grammar_seconds",
}
IN_TEST_CONNECTION = {"max_small_chunks"}
IN_TEST_IMAGES = {
    "max_images",
    "max_image_pixels",
    "max_image_aspect",
    "max_image_frames",
    "max_request_pixels",
    "max_image_bytes",
    "max_image_memory",
    "image_timeout_s",
}
IN_TEST_ACCESS = {
    "max_connections",
    "max_head_bytes",
    "head_timeout_s",
    "read_timeout_s",
    "max_headers",
}


def post(server: ServerProcess, **body: Any) -> httpx.Response:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    given = {"model": "tiny", **({} if "messages" in body else {"prompt": "a"}), **body}
    return httpx.post(server.url + path, json=given, timeout=patience())


def test_every_limit_is_tested() -> None:
    elsewhere = IN_TEST_STRUCTURED | IN_TEST_ACCESS | IN_TEST_CLIENTS | IN_TEST_CONNECTION
    elsewhere |= IN_TEST_IMAGES
    assert {*OVER, *BY_THE_ENGINE, *BY_ALL_TOGETHER, *elsewhere} == set(LIMIT_NAMES)


@pytest.fixture(scope="module")
def small(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("limits") / "tiny"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = [word for pair in SMALL.items() for word in pair]
    with run_server("--model", str(folder), *flags, stub="echo") as server:
        yield server.wait_ready()


@pytest.mark.parametrize("name", OVER)
def test_request_over_a_limit_is_refused_and_counted(small: ServerProcess, name: str) -> None:
    before = small.limits_exceeded()
    answer = post(small, **OVER[name])
    assert answer.status_code == (413 if name == "max_body_bytes" else 400), answer.text
    assert small.limits_exceeded() == {**before, name: before[name] + 1}
    assert post(small, messages=[USER] * 2, max_tokens=1).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_answer_that_takes_too_long_is_ended_and_counted(
    small: ServerProcess, stream: bool
) -> None:
    before = small.limits_exceeded()["max_total_s"]
    answer = post(small, prompt="a b", max_tokens=1900, stream=stream)
    assert answer.status_code == (200 if stream else 504)
    assert '"code":"ran_too_long"' in answer.text
    assert small.limits_exceeded()["max_total_s"] == before + 1


def test_connections_are_not_limited_by_open_files(tiny_model: Path) -> None:
    """Regression: above some thousand, connections (also of probes) ended without a response."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Other tests of this process may have left files open.
    limit = max(int(name) for name in os.listdir("/proc/self/fd")) + 32
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        with run_server("--model", str(tiny_model), stub="loading") as server:
            wait_for(lambda: server.status("/livez") == 200, "livez")
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            address = httpx.URL(server.url)
            with contextlib.ExitStack() as stack:
                for _ in range(limit + 36):
                    idle = socket.create_connection((address.host, address.port))
                    stack.enter_context(idle)
                assert server.status("/livez") == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_incomplete_bodies_are_bounded_together(tiny_model: Path) -> None:
    """Regression: each of 4,096 connections could hold 16 MiB; 30 of them took 440 MiB."""
    head = b"POST /v1/completions HTTP/1.1\r\n" + JSON_BODY + b"connection: close\r\n"
    body = b'{"model":"tiny","prompt":"a","user":"%s"}' % (b"u" * 100_000)
    first, rest = body[:90_000], body[90_000:]
    flags = ("--model", str(tiny_model), "--max-bodies-bytes", "150000")
    with run_server(*flags, stub="echo") as server:
        address = httpx.URL(server.wait_ready().url)
        with contextlib.ExitStack() as stack:
            halves = []
            for _ in range(2):
                half = socket.create_connection((address.host, address.port), timeout=patience())
                stack.enter_context(half)
                half.sendall(head + b"content-length: %d\r\n\r\n%s" % (len(body), first))
                halves.append(half)
                wait_for(lambda: server.metrics()["http_requests_in_flight"] == 1, "the first")
            assert halves[1].recv(12) == b"HTTP/1.1 503"
            # Its parts may arrive one by one, and count until the body is complete.
            assert post(server, user="u" * 50_000).status_code == 200
            halves[0].sendall(rest)
            assert halves[0].recv(12) == b"HTTP/1.1 200"
        found = {name: count for name, count in server.limits_exceeded().items() if count}
        assert found == {"max_bodies_bytes": 1}


def test_queue_is_bounded_in_requests_tokens_and_time(tiny_model: Path) -> None:
    """Without a bound, every client waits forever."""
    flags = ("--max-queued-requests", "2", "--max-queued-tokens", "3", "--max-wait", "3")
    with run_server("--model", str(tiny_model), *flags, stub="hang") as server:
        server.wait_ready()
        waiting: list[httpx.Response] = []
        caller = threading.Thread(target=lambda: waiting.append(post(server, prompt=[5, 6])))
        caller.start()
        wait_for(lambda: server.metrics()["requests_running"] == 1, "the first request")
        for body in ({"n": 2}, {"prompt": [5, 6]}):
            answer = post(server, **body)
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["code"] == "overloaded"
        caller.join(patience())
        assert (waiting[0].status_code, waiting[0].headers["retry-after"]) == (503, "1")
        assert waiting[0].json()["error"]["code"] == "deadline_exceeded"
        found = {name: count for name, count in server.limits_exceeded().items() if count}
        assert found == {"max_queued_reqs": 1, "max_queued_tokens": 1, "max_wait_s": 1}
        told = server.metrics()
        assert told["requests_rejected_total{reason=queue_full}"] == 2
        message = post(server, n=3).json()["error"]["message"]
        assert message.startswith("one call may ask for at most 2")


def test_scheduler_refuses_a_request_that_can_never_fit(tiny_model: Path) -> None:
    """The API server gets a too high memory size, so that only the scheduler refuses."""
    flags = ("--num-pages", "8", "--admin-api-key", "root")
    with run_server("--model", str(tiny_model), *flags) as server:
        boast = msgspec.structs.replace(FACTS, kv_capacity_tokens=2000)
        api: Sender[Ready] = Sender(endpoint(str(server.wait_ready().socket_folder()), "api"))
        api.send(Ready(role="scheduler", facts=boast))
        admin = {"authorization": "Bearer root"}

        def believed() -> bool:
            url = server.url + "/server_info"
            model = httpx.get(url, headers=admin, timeout=patience()).json()["model"]
            return model["kv_capacity_tokens"] == 2000

        wait_for(believed, "the boast to be believed")
        api.close()
        for more in ({}, {"stream": True}, {"n": 2}):
            answer = post(server, prompt=[5] * 120, max_tokens=9, **more)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["code"], error["type"]) == (
                "context_length_exceeded",
                "invalid_request_error",
            )
            assert "120 prompt tokens and 9 output tokens exceed the 128" in error["message"]
        assert post(server, prompt=[5] * 110, max_tokens=9).status_code == 200
        assert server.limits_exceeded()["max_seq_len"] == 3
