"""Streams of the Responses and the Messages API end properly when the server drains."""

import json
import signal
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


def drained_events(model: Path, path: str, max_tokens: int, *flags: str) -> list[dict[str, Any]]:
    """Begin a stream, send SIGTERM after its first text, and return the events to its end."""
    with run_server("--model", str(model), "--drain-grace", "0", *flags, stub="echo") as server:
        body = {"model": "tiny", "stream": True, **bodies(max_tokens)[path]}
        url = server.wait_ready().url + path
        events: list[dict[str, Any]] = []
        with httpx.stream("POST", url, json=body, timeout=patience()) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
                    if len([e for e in events if "delta" in e["type"]]) == 1:
                        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        return events


@pytest.mark.parametrize("path", [*bodies(1)])
def test_running_stream_is_complete(tiny_model: Path, path: str) -> None:
    *_, before_last, last = drained_events(tiny_model, path, 400)
    if path == "/v1/responses":
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    else:
        assert (before_last["type"], last["type"]) == ("message_delta", "message_stop")
        assert before_last["delta"]["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("path", [*bodies(1)])
def test_stream_after_the_deadline_ends_with_an_error(tiny_model: Path, path: str) -> None:
    *_, last = drained_events(tiny_model, path, 1900, "--drain-timeout", "0.5")
    is_response = path == "/v1/responses"
    assert last["type"] == ("response.failed" if is_response else "error")
    error = last["response"]["error"] if is_response else last["error"]
    assert error["message"] == "the server is shutting down"
