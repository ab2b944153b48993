"""Streams of the Responses and the Messages API end properly when the server drains."""

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import run_server

pytestmark = pytest.mark.process

HELLO = [{"role": "user", "content": "hi"}]


def bodies(max_tokens: int) -> dict[str, dict[str, Any]]:
    """Return a streaming request of each API, by its path."""
    return {
        "/v1/responses": {"input": HELLO, "max_output_tokens": max_tokens},
        "/v1/messages": {"messages": HELLO, "max_tokens": max_tokens},
    }


def parsed(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def drained_events(model: Path, max_tokens: int, *flags: str) -> dict[str, list[dict[str, Any]]]:
    """Begin a stream of each API, send SIGTERM after the first text of both, and read to the end.

    Returns the events of each path.
    """
    begun: dict[str, list[dict[str, Any]]] = {}
    streams: dict[str, Iterator[dict[str, Any]]] = {}
    flags = ("--model", str(model), "--drain-grace", "0", *flags)
    with run_server(*flags, stub="echo") as server, contextlib.ExitStack() as stack:
        url = server.wait_ready().url
        for path, body in bodies(max_tokens).items():
            body = {"model": "tiny", "stream": True, **body}
            call = httpx.stream("POST", url + path, json=body, timeout=patience())
            answer = stack.enter_context(call)
            assert answer.status_code == 200
            streams[path], begun[path] = parsed(answer.iter_lines()), []
            while not begun[path] or "delta" not in begun[path][-1]["type"]:
                begun[path].append(next(streams[path]))
        server.signal(signal.SIGTERM)
        found = {path: [*begun[path], *events] for path, events in streams.items()}
        assert server.wait_exit() == 0
    return found


def test_running_streams_are_complete(tiny_model: Path) -> None:
    found = drained_events(tiny_model, 600)
    last = found["/v1/responses"][-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    *_, before_last, last = found["/v1/messages"]
    assert (before_last["type"], last["type"]) == ("message_delta", "message_stop")
    assert before_last["delta"]["stop_reason"] == "max_tokens"


def test_streams_after_the_deadline_end_with_an_error(tiny_model: Path) -> None:
    found = drained_events(tiny_model, 1900, "--drain-timeout", "0.5")
    response, error = found["/v1/responses"][-1], found["/v1/messages"][-1]
    assert (response["type"], error["type"]) == ("response.failed", "error")
    for reason in (response["response"]["error"], error["error"]):
        assert reason["message"] == "the server is shutting down"
