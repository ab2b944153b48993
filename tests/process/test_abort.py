"""A request aborted in any state, by a disconnect or /abort, leaves no page and no row behind."""

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import JSON_BODY, ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process

ADMIN = {"authorization": "Bearer root"}
PAGES = 256
BACK_S = 1.0  # The contract: all pages are free again one second after a disconnect.
LONG = [3 + i % 40 for i in range(1900)]  # As many steps: the server prefills one token per step.
ENDLESS = {"prompt": [5, 6, 7], "max_tokens": 1900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[ServerProcess]:
    flags = ("--num-pages", str(PAGES), "--max-running-requests", "1", "--admin-api-key", "root")
    with run_server("--model", str(tiny_model), *flags, "--max-prefill-length", "1") as found:
        yield found.wait_ready()


class Call:
    """One request on its own connection, with the request id `victim`."""

    def __init__(self, server: ServerProcess, name: str = "victim", **body: Any) -> None:
        parts = urlsplit(server.url)
        self.name = name
        self.answer = b""
        self._socket = socket.create_connection((parts.hostname, parts.port), timeout=patience())
        text = json.dumps({"model": "tiny", "temperature": 0, **body}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\n{JSON_BODY.decode()}connection: close\r\n"
        head += f"x-request-id: {name}\r\ncontent-length: {len(text)}\r\n\r\n"
        self._socket.sendall(head.encode() + text)

    def read_until(self, part: bytes) -> None:
        while part not in self.answer:
            data = self._socket.recv(65536)
            assert data, self.answer
            self.answer += data

    def close(self) -> None:
        self._socket.close()


def info(server: ServerProcess) -> dict[str, Any]:
    return dict(httpx.get(server.url + "/server_info", headers=ADMIN, timeout=patience()).json())


def abort(server: ServerProcess, call: Call) -> int:
    body = {"request_id": call.name}
    answer = httpx.post(server.url + "/abort", json=body, headers=ADMIN, timeout=patience())
    return int(answer.json()["aborted"])


@contextlib.contextmanager
def stopped(server: ServerProcess, name: str) -> Iterator[None]:
    """Stop this worker process by SIGSTOP for the duration of the block."""
    pid = server.child_pid(name)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


Leave = Callable[[Call], None]


def tokenizing(server: ServerProcess, leave: Leave) -> None:
    with stopped(server, "tokenizer-0"):
        call = Call(server, prompt="one two")
        wait_for(lambda: info(server)["open_requests"] == 1, "the call")
        leave(call)
        wait_for(lambda: info(server)["open_requests"] == 0, "its end")


def queued(server: ServerProcess, leave: Leave) -> None:
    first = Call(server, "first", **ENDLESS)
    first.read_until(b"data:")
    call = Call(server, prompt=[8, 9])
    wait_for(lambda: server.metrics()["requests_waiting"] == 1, "the queue")
    leave(call)
    wait_for(lambda: server.metrics()["requests_waiting"] == 0, "its end", BACK_S)
    assert server.metrics()["requests_running"] == 1
    first.close()


def between_chunks(server: ServerProcess, leave: Leave) -> None:
    def prefills() -> float:
        return server.metrics()["batch_size_count{phase=prefill}"]

    before, firsts = prefills(), server.metrics()["time_to_first_token_seconds_count"]
    call = Call(server, prompt=LONG)
    wait_for(lambda: prefills() > before, "a chunk")
    with stopped(server, "scheduler"):
        assert server.metrics()["time_to_first_token_seconds_count"] == firsts, (
            "the first token came before the abort"
        )
        leave(call)
        wait_for(lambda: info(server)["open_requests"] == 0, "its end in the API server")


def decoding(server: ServerProcess, leave: Leave) -> None:
    call = Call(server, **ENDLESS)
    call.read_until(b"data:")
    leave(call)


def in_the_last_step(server: ServerProcess, leave: Leave) -> None:
    """The client has the first of two tokens: the scheduler is in the last step or after it."""
    call = Call(server, **{**ENDLESS, "max_tokens": 2})
    call.read_until(b"data:")
    leave(call)


def ended_unknown_to_the_api(server: ServerProcess, leave: Leave) -> None:
    before = info(server)["stats"]["output_tokens_total"]
    with stopped(server, "detokenizer"):
        call = Call(server, **{**ENDLESS, "max_tokens": 100})

        def ended() -> bool:
            # The stats come from another process, so `before` may lack the 5 tokens of answer().
            stats = info(server)["stats"]
            return stats["output_tokens_total"] >= before + 100 and not stats["busy"]

        wait_for(ended, "the last token")
        leave(call)


def finished(server: ServerProcess, leave: Leave) -> None:
    call = Call(server, **{**ENDLESS, "max_tokens": 3})
    call.read_until(b"data: [DONE]")
    wait_for(lambda: info(server)["open_requests"] == 0, "its end")
    leave(call)


# The allowed results of /abort. In the last step, the abort and the end of the request race.
STATES: dict[Callable[[ServerProcess, Leave], None], set[int]] = {
    tokenizing: {1},
    queued: {1},
    between_chunks: {1},
    decoding: {1},
    in_the_last_step: {0, 1},
    ended_unknown_to_the_api: {1},
    finished: {0},
}


@pytest.mark.parametrize("way", ["disconnect", "abort", "abort and disconnect"])
@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_aborted_request_leaves_nothing_after_a_second(
    server: ServerProcess, state: Callable[[ServerProcess, Leave], None], way: str
) -> None:
    good = {"model": "tiny", "prompt": [11, 12, 13], "max_tokens": 5, "temperature": 0}

    def leave(call: Call) -> None:
        if "abort" in way:
            assert abort(server, call) in STATES[state]
            assert abort(server, call) == 0, "an abort is idempotent"
        if way == "abort" and state is not finished:
            call.read_until(b"cancelled" if STATES[state] == {1} else b"data: [DONE]")
        call.close()

    def whole() -> bool:
        found = server.metrics()
        states = {s: found[f"kv_cache_tokens{{state={s}}}"] for s in ("used", "evictable", "free")}
        assert sum(states.values()) == PAGES * 16
        waiting, running = found["requests_waiting"], found["requests_running"]
        return (states["used"], waiting, running) == (0, 0, 0)

    def answer() -> str:
        given = httpx.post(server.url + "/v1/completions", json=good, timeout=patience())
        return str(given.json()["choices"][0]["text"])

    expected = answer()
    for _ in range(10 if state is in_the_last_step else 1):
        state(server, leave)
        wait_for(whole, "all pages", BACK_S)
    assert info(server)["open_requests"] == 0
    assert answer() == expected
