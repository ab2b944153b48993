"""The server serves while its log cannot be written: a full disk, or a pipe without a reader."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import wait_for

pytestmark = pytest.mark.process


def _ready(user: httpx.Client) -> bool:
    try:
        return user.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


@contextlib.contextmanager
def server_with_output(model: Path, output: int) -> Iterator[httpx.Client]:
    """A ready stub server that logs to this file descriptor. It must end with code 0."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.process.stub_server", "echo", "--model", str(model)]
    process = subprocess.Popen([*command, "--port", str(port)], stdout=output, stderr=output)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=patience()) as user:
            wait_for(lambda: process.poll() is None and _ready(user), "readiness")
            yield user
        process.terminate()
        assert process.wait(patience()) == 0
    finally:
        process.kill()
        process.wait()


def test_server_starts_and_serves_on_a_full_disk(tiny_model: Path) -> None:
    """Regression: the launcher and the line with the URL ended the service."""
    with (
        open("/dev/full", "wb") as full,
        server_with_output(tiny_model, full.fileno()) as user,
    ):
        body = {"model": "tiny", "prompt": "a b", "max_tokens": 2}
        assert user.post("/v1/completions", json=body).status_code == 200


def test_refused_requests_without_a_reader_of_stderr_do_not_stop_the_probes(
    tiny_model: Path,
) -> None:
    """Regression: each malformed request was a log line, and the 35th blocked the event loop."""
    read_end, write_end = os.pipe()  # The test does not read.
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    try:
        with server_with_output(tiny_model, write_end) as user:
            for _ in range(200):
                assert user.get("/nowhere").status_code == 404
                address = (user.base_url.host, user.base_url.port)
                with socket.create_connection(address, timeout=patience()) as connection:
                    connection.sendall(b"\x16\x03\x01")
                    assert connection.recv(12) == b"HTTP/1.1 400"
            assert user.get("/livez").status_code == 200
    finally:
        os.close(write_end)
        os.close(read_end)
