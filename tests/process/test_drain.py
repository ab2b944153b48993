"""SIGTERM starts a drain: unready at once, no lost request, a deadline, exit code 0."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.patience import patience
from tests.process.harness import JSON_BODY, ServerProcess, run_server, wait_for

pytestmark = pytest.mark.process


class Caller:
    """One streaming call in a thread. `text` is the text received so far."""

    def __init__(self, server: ServerProcess, max_tokens: int) -> None:
        self.text = ""
        self.status = 0
        self._body = {
            "model": "tiny",
            "prompt": "a b c",
            "max_tokens": max_tokens,
            "stream": True,
        }
        self._url = server.url + "/v1/completions"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        own = {"x-request-id": "mine"}
        with httpx.stream(
            "POST", self._url, json=self._body, headers=own, timeout=patience()
        ) as response:
            self.status = response.status_code
            for part in response.iter_text():
                self.text += part

    def wait_first(self) -> "Caller":
        wait_for(lambda: self.text, "the first text")
        return self

    def join(self) -> "Caller":
        self._thread.join(patience())
        return self


@contextlib.contextmanager
def serving(model: Path, *flags: str) -> Iterator[ServerProcess]:
    with run_server("--model", str(model), *flags, stub="echo") as server:
        yield server.wait_ready()


def short_call(server: ServerProcess) -> httpx.Response:
    body = {"model": "tiny", "prompt": "a", "max_tokens": 1}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=patience())


def call(
    connection: http.client.HTTPConnection, max_tokens: int, stream: bool = False
) -> http.client.HTTPResponse:
    """Make a call on this connection. A response that does not stream is read to its end."""
    body = {"model": "tiny", "prompt": "a b c", "max_tokens": max_tokens, "stream": stream}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    answer = connection.getresponse()
    if not stream:
        answer.read()
    return answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_finishes_running_requests_and_exits_0(
    tiny_model: Path, number: signal.Signals
) -> None:
    """Regression: SIGHUP of a closing terminal cut all answers; the socket folder remained."""
    with serving(tiny_model, "--drain-grace", "0") as server:
        pids = list(server.child_pids().values())
        folder = server.socket_folder()
        caller = Caller(server, max_tokens=400).wait_first()
        server.signal(number)
        assert server.wait_exit() == 0
        text = caller.join().text
        assert '"finish_reason":"length"' in text
        assert text.endswith("data: [DONE]\n\n")
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert not folder.exists()


def test_only_the_api_server_listens(stub_server: ServerProcess) -> None:
    """Regression: the launcher listened too; clients could connect after the API server ended."""
    port = httpx.URL(stub_server.url).port
    hosts = [psutil.Process(pid) for pid in (stub_server.pid, *stub_server.child_pids().values())]
    found = [at for host in hosts for at in host.net_connections("tcp") if at.laddr.port == port]
    assert [at.status for at in found if not at.raddr] == ["LISTEN"]


def test_grace_accepts_while_unready_and_then_refuses_with_retry_after(tiny_model: Path) -> None:
    with serving(tiny_model, "--drain-grace", "3") as server:
        caller = Caller(server, max_tokens=2000).wait_first()
        assert "connection" not in short_call(server).headers
        server.signal(signal.SIGTERM)
        wait_for(lambda: server.status("/readyz") == 503, "unreadiness")
        assert server.status("/livez") == 200
        answer = short_call(server)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")

        def refused() -> httpx.Response | None:
            answer = short_call(server)
            return answer if answer.status_code == 503 else None

        answer = wait_for(refused, "the end of the grace")
        assert answer.headers["retry-after"]
        assert server.status("/livez") == 200
        assert server.wait_exit() == 0
        assert caller.join().text.endswith("data: [DONE]\n\n")


def test_operator_can_abort_a_request_during_a_drain(tiny_model: Path) -> None:
    """Regression: /abort was refused after the grace period, like a call of the model."""
    with serving(tiny_model, "--drain-grace", "0", "--admin-api-key", "root") as server:
        caller = Caller(server, max_tokens=2000).wait_first()
        server.signal(signal.SIGTERM)
        wait_for(lambda: short_call(server).status_code == 503, "the refusal of calls")
        with httpx.Client(base_url=server.url, timeout=patience()) as admin:
            headers = {"authorization": "Bearer root"}
            ended = admin.post("/abort", json={"request_id": "mine"}, headers=headers)
        assert ended.json() == {"aborted": 1}
        assert server.wait_exit() == 0
        assert '"code":"cancelled"' in caller.join().text


def test_kept_connections_are_told_to_close_before_they_are_refused(tiny_model: Path) -> None:
    """A client without retries is never refused on a connection that it was not told to close."""
    with serving(tiny_model, "--drain-grace", "2") as server:
        address = httpx.URL(server.url)
        idle = http.client.HTTPConnection(address.host, address.port, timeout=patience())
        busy = http.client.HTTPConnection(address.host, address.port, timeout=patience())
        assert call(idle, max_tokens=1).status == 200
        stream = call(busy, max_tokens=2000, stream=True)
        server.signal(signal.SIGTERM)
        wait_for(lambda: server.status("/readyz") == 503, "unreadiness")
        answer = call(idle, max_tokens=1)
        assert (answer.status, answer.headers["connection"]) == (200, "close")

        wait_for(lambda: short_call(server).status_code == 503, "the end of the grace")
        assert stream.read().endswith(b"data: [DONE]\n\n")
        assert "connection" not in stream.headers
        answer = call(busy, max_tokens=1)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert server.wait_exit() == 0


def test_deadline_ends_the_rest_with_an_error_chunk(tiny_model: Path) -> None:
    flags = ("--drain-grace", "0", "--drain-timeout", "0.5")
    with serving(tiny_model, *flags) as server:
        caller = Caller(server, max_tokens=2000).wait_first()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        text = caller.join().text
        assert '{"error":{"message":"the server is shutting down"' in text
        assert text.endswith("data: [DONE]\n\n")


def test_drain_does_not_wait_for_a_client_that_does_not_read(tiny_model: Path) -> None:
    """Regression: the client's request ended after the scheduler's queue, with a ZMQError."""
    body = {"model": "tiny", "prompt": ["a"] * 128, "max_tokens": 1900, "stream": True}
    text = json.dumps(body).encode()
    flags = ("--drain-grace", "0", "--drain-timeout", "0.5")
    with serving(tiny_model, *flags) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = httpx.URL(server.url)
        deaf.connect((url.host, url.port))
        head = b"POST /v1/completions HTTP/1.1\r\n" + JSON_BODY + b"content-length: %d\r\n\r\n"
        deaf.sendall(head % len(text) + text)
        # All buffers together take some 500 KB, at 200 bytes per token.
        wait_for(lambda: server.metrics()["generation_tokens_total"] > 10_000, "full buffers")
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert "Traceback" not in server.stderr


def test_drain_does_not_wait_for_pipelined_requests_of_a_client_that_does_not_read(
    tiny_model: Path,
) -> None:
    """Regression: the cancelled response became a 500 that waited for the client; exit code 1."""
    flags = ("--drain-grace", "0", "--drain-timeout", "0.5")
    with serving(tiny_model, *flags) as server, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        url = httpx.URL(server.url)
        deaf.connect((url.host, url.port))
        deaf.sendall(
            b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n" * 600
        )  # more than all buffers hold

        def begun() -> bool:
            scrape = httpx.get(server.url + "/metrics", timeout=patience())
            return 'route="/openapi.json"' in scrape.text

        wait_for(begun, "the first answers")
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0


def test_process_that_dies_after_the_drain_leaves_no_traceback(tiny_model: Path) -> None:
    """Regression: the API server got the signal after its end and raised InvalidStateError."""
    flags = ("--drain-grace", "0", "--drain-timeout", "0.5")
    with serving(tiny_model, *flags) as server, socket.socket() as slow:
        tokenizer = psutil.Process(server.child_pid("tokenizer-0"))
        url = httpx.URL(server.url)
        slow.connect((url.host, url.port))
        slow.sendall(
            b"POST /v1/completions HTTP/1.1\r\n" + JSON_BODY + b"content-length: 2\r\n\r\n{"
        )
        wait_for(lambda: server.metrics()["http_requests_in_flight"], "the request")
        server.signal(signal.SIGTERM)
        wait_for(lambda: " drained" in server.stderr, "the end of the drain")
        with contextlib.suppress(psutil.NoSuchProcess):  # the server waits 3 s for the body
            tokenizer.kill()
        server.wait_exit()
        assert "Traceback" not in server.stderr


def test_second_signal_ends_at_once(tiny_model: Path) -> None:
    with serving(tiny_model, "--drain-grace", "600", "--drain-timeout", "600") as server:
        pids = list(server.child_pids().values())
        server.signal(signal.SIGTERM)
        wait_for(lambda: server.status("/readyz") == 503, "unreadiness")

        def told() -> bool:
            return "stopping at once" in server.stderr

        while not told():  # a signal within 0.2 s counts as the first one
            server.signal(signal.SIGTERM)
            with contextlib.suppress(AssertionError):
                wait_for(told, "the second signal", seconds=1)
        server.wait_exit()
        assert server.process.returncode == 128 + signal.SIGTERM
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_sigterm_ends_a_download_at_once() -> None:
    """PID 1 has no default action for SIGTERM."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        url = f"http://127.0.0.1:{hub.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl", "--model", "someone/something"],
            env={**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0"},
            stderr=subprocess.PIPE,
            text=True,
        )
        with process, hub.accept()[0]:  # the hub accepts the connection and does not answer
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=patience())
        assert process.returncode == 128 + signal.SIGTERM
        assert "SIGTERM ended the start while the model was looked up" in errors.splitlines()[-1]


def test_real_engine_drains_and_exits_0(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), "--drain-grace", "0") as server:
        caller = Caller(server.wait_ready(), max_tokens=300).wait_first()
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        assert caller.join().text.endswith("data: [DONE]\n\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="making a PID namespace needs root here")
def test_sigterm_works_as_pid_1(tiny_model: Path, tmp_path: Path) -> None:
    """Without an init, mini-sglang ignored SIGTERM and joined its children forever."""
    probe = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "true"]
    if subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("PID namespaces are not available here")
    script = (
        "import os, subprocess, sys\n"
        "assert os.getpid() == 1\n"
        # PID 1 inherits this orphan. It must reap it, and must not end the service.
        "subprocess.Popen(['sh', '-c', 'sleep 0.1 & sleep 0.2 &']).wait()\n"
        "from tests.process import stub_server\n"
        "sys.exit(stub_server.main())\n"
    )
    err = tmp_path / "err"
    flags = ["--model", str(tiny_model), "--port", "0", "--drain-grace", "0"]
    with err.open("wb") as sink:
        outer = subprocess.Popen(
            [*probe[:-1], sys.executable, "-c", script, "echo", *flags],
            stdout=sink,
            stderr=sink,
        )
    with outer:
        wait_for(lambda: b"minisgl serves" in err.read_bytes(), "readiness")
        (inner,) = psutil.Process(outer.pid).children()
        inner.send_signal(signal.SIGTERM)
        assert outer.wait(patience()) == 0, err.read_text()
