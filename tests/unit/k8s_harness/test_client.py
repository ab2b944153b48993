"""The load inside the cluster: whole calls count, and all others are reported with a reason."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from k8s_harness.client import SCRIPTS, faults, require_whole, script_pod

from tests.patience import patience

STREAMS = SCRIPTS / "streams.py"
WHOLE = {"status": 200, "error": None, "done": True, "finish": "length"}
WHOLE |= {"tokens": 5, "usage": 5, "asked": 5}


@pytest.mark.parametrize(
    "change",
    [
        {"status": 503},
        {"error": "ConnectionResetError: gone"},
        {"done": False},
        {"finish": "stop"},
        {"tokens": 4},
        {"usage": 4},
        {"tokens": 6, "usage": 6},
    ],
)
def test_an_incomplete_call_is_a_fault(change: dict[str, Any]) -> None:
    bad = {**WHOLE, **change}
    assert faults([WHOLE, bad]) == [bad]
    with pytest.raises(AssertionError, match="1 of 2 calls failed"):
        require_whole([WHOLE, bad])


def test_every_call_must_end() -> None:
    require_whole([WHOLE], 1)
    with pytest.raises(AssertionError, match="1 calls ended"):
        require_whole([WHOLE], 2)


def test_pods_of_scripts_are_restricted() -> None:
    spec = script_pod("client", "image", ["-c", "pass"], 80)["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["readinessProbe"]["tcpSocket"] == {"port": 80}


class Server(ThreadingHTTPServer):
    """Streams as minisgl does. Special values of max_tokens select a failure."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.peers: list[tuple[str, int]] = []
        self.heads: list[dict[str, str]] = []
        self.priorities: list[int] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.peers.append(self.client_address)
        self.server.heads.append(dict(self.headers))
        self.server.priorities.append(body["priority"])
        count = body["max_tokens"]
        if count == 503:
            self.send_response(503)
            self.send_header("Content-Length", "4")
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(b"full")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n in range(count):
            last = "length" if n == count - 1 else None
            self.chunk({"choices": [{"token_ids": [n], "finish_reason": last}]})
            if count == 13:
                self.close_connection = True
                return
        if count == 17:
            self.chunk({"error": {"message": "the server is shutting down"}})
        self.chunk({"choices": [], "usage": {"completion_tokens": count}})
        self.write(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def chunk(self, event: dict[str, Any]) -> None:
        self.write(f"data: {json.dumps(event)}\n\n".encode())

    def write(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as serving:
        threading.Thread(target=serving.serve_forever, args=(0.01,), daemon=True).start()
        yield serving
        serving.shutdown()


def stream(server: Server, *tokens: int, repeat: bool = False, **more: Any) -> list[dict[str, Any]]:
    """Runs the script with one stream per number of tokens and returns its events.

    Every second stream keeps its connection. repeat: until each thread has ended four calls.
    """
    url = f"http://127.0.0.1:{server.server_port}"
    streams = [{"tokens": n, "keep_alive": bool(i % 2)} for i, n in enumerate(tokens)]
    config = {"url": url, "repeat": repeat, "streams": streams, **more}
    command = [sys.executable, STREAMS, json.dumps(config)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(json.loads(line))
            ends = [one["worker"] for one in lines if one["event"] == "end"]
            if repeat and all(ends.count(worker) >= 4 for worker in range(len(tokens))):
                process.stdin.write("stop\n")
                process.stdin.flush()
                repeat = False
        assert process.wait(patience(30)) == 0
    assert lines.pop() == {"event": "over"}
    return lines


def test_whole_streams_are_counted_token_by_token(server: Server) -> None:
    lines = stream(server, 5, 6, key="secret")
    ends = sorted((line for line in lines if line["event"] == "end"), key=lambda e: e["worker"])
    require_whole(ends, 2)
    assert [end["asked"] for end in ends] == [5, 6]
    assert [line["worker"] for line in lines if line["event"] == "first"].sort() is None
    assert {head["Authorization"] for head in server.heads} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("count", "words"),
    [(503, "full"), (17, "shutting down"), (13, "ended early")],
    ids=["refused", "error-event", "cut"],
)
def test_a_failed_call_is_not_repeated(server: Server, count: int, words: str) -> None:
    (end,) = (line for line in stream(server, count) if line["event"] == "end")
    assert words in end["error"]
    assert faults([end]) == [end]
    assert len(server.peers) == 1


def test_threads_repeat_until_stopped_and_every_second_one_keeps_its_connection(
    server: Server,
) -> None:
    ends = [line for line in stream(server, 5, 6, repeat=True) if line["event"] == "end"]
    require_whole(ends)
    kept = [end for end in ends if end["worker"] == 1]
    fresh = len(ends) - len(kept)
    assert min(len(kept), fresh) >= 4
    assert len(set(server.peers)) == fresh + 1
    assert sum("Connection" in head for head in server.heads) == fresh


def test_streams_have_the_priority_of_their_load(server: Server) -> None:
    stream(server, 2)
    stream(server, 2, priority=5)
    assert server.priorities == [0, 5]
