"""Starts servers from the command line, and waits for conditions with a deadline."""

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from minisgl.server.observe.metrics import CACHED_S
from tests.forks import ForkedProcess
from tests.patience import patience

__all__ = [
    "JSON_BODY",
    "ServerProcess",
    "Stream",
    "assert_told",
    "run_server",
    "start_long_stream",
    "wait_for",
]

_PROBE_URL = re.compile(r"listening for probes on (https?://\S+)")
# The headers that a request with a body needs, for tests that write to a socket.
JSON_BODY = b"host: localhost\r\ncontent-type: application/json\r\n"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.1
_URL = re.compile(r"listening on (https?://\S+)")

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T],
    goal: str | Callable[[], str],
    seconds: float = 90.0,
) -> T:
    """Wait for a true value of `condition` and return it. Fail with `goal`; see `patience`.

    The time between two looks at `condition` grows, because a look often makes an HTTP request,
    which takes 3 ms of CPU time.
    """
    started, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() - started > patience(seconds):
            raise AssertionError(f"gave up waiting for {goal if isinstance(goal, str) else goal()}")
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


class ServerProcess:
    """A running `minisgl`; its stdout and stderr go to files."""

    def __init__(self, words: list[str], folder: Path, fresh: bool, max_files: int | None) -> None:
        """words: the module and its arguments. fresh, max_files: see `run_server`."""
        self._folder = folder
        self._out = folder / "out"
        self._err = folder / "err"
        # A killed launcher does not remove its socket folder. Removing this folder removes it.
        environ = {**os.environ, "TMPDIR": str(folder)}
        self.process: ForkedProcess | subprocess.Popen[bytes]
        if not fresh:
            self.process = ForkedProcess(words, self._out, self._err, environ, max_files)
            return
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                stdout=out,
                stderr=err,
                env=environ,
                preexec_fn=_limit_of_files(max_files),
            )

    @property
    def stdout(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def probe_url(self) -> str:
        """The URL of --probe-port, once `url` is known."""
        found = _PROBE_URL.search(self.stderr)
        assert found, "the server has no --probe-port"
        return found.group(1)

    @property
    def url(self) -> str:
        def find() -> str | None:
            assert self.process.poll() is None, f"the server ended: {self.stderr}"
            found = _URL.search(self.stderr)
            return found.group(1) if found else None

        return wait_for(find, "the URL")

    def status(self, path: str) -> int:
        """Return the HTTP status of a probe; 0 if the server does not respond."""
        try:
            return httpx.get(self.url + path, timeout=patience()).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> "ServerProcess":
        wait_for(lambda: self.status("/readyz") == 200, lambda: f"readiness: {self.stderr}")
        return self

    def child_pids(self) -> dict[str, int]:
        """Return the pids of the running child processes by name."""
        pids = {}
        for child in psutil.Process(self.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "minisgl.launch.worker_main" in words or "tests.process.stub_scheduler" in words:
                    pids[words[-2]] = child.pid
                else:
                    pids[child.name()] = child.pid  # a fork
        return pids

    def child_pid(self, name: str) -> int:
        return wait_for(lambda: self.child_pids().get(name), f"the child {name}")

    def wait_exit(self) -> int:
        return self.process.wait(timeout=patience())

    def client(self, retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=self.url + "/v1", api_key="none", max_retries=retries, timeout=patience()
        )

    def metrics(self) -> dict[str, float]:
        """Return the values by name, without minisgl_, and by labels, without model_name.

        The server answers with a scrape of up to CACHED_S ago. The method waits CACHED_S first, so
        that its values are younger than its call.
        """
        time.sleep(CACHED_S)
        answer = httpx.get(self.url + "/metrics", timeout=patience())
        answer.raise_for_status()
        samples = (line.rpartition(" ") for line in answer.text.splitlines() if line[0] != "#")
        return {_name_of(series): float(value) for series, _, value in samples}

    def limits_exceeded(self) -> dict[str, float]:
        """Return the number of rejections by each limit."""
        start = "limits_exceeded_total{limit="
        found = {k: v for k, v in self.metrics().items() if k.startswith(start)}
        return {name[len(start) : -1]: count for name, count in found.items()}

    def socket_folder(self) -> Path:
        (found,) = self._folder.glob("minisgl-*")
        return found

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@cache
def _name_of(series: str) -> str:
    """Return the name and the labels of a series as `metrics` gives them.

    The parser takes 10 ms of CPU time for all series of a scrape. Each scrape has the same series.
    """
    ((sample,),) = [family.samples for family in text_string_to_metric_families(f"{series} 0\n")]
    labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
    shown = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
    return sample.name.removeprefix("minisgl_") + (shown and f"{{{shown}}}")


def _limit_of_files(count: int | None) -> Callable[[], None] | None:
    """Return a function that a child calls to set its limit of open files; None: no limit."""
    if count is None:
        return None
    limits = (count, count)
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@contextlib.contextmanager
def run_server(
    *flags: str, stub: str | None = None, fresh: bool = False, max_files: int | None = None
) -> Iterator[ServerProcess]:
    """Run a server on a free port. `stub`: mode of a stub that replaces the scheduler.

    fresh: start the server as a user does, instead of in a fork (tests/forks.py).
    max_files: hard limit of the open files of each process.
    """
    module = ["minisgl"] if stub is None else ["tests.process.stub_server", stub]
    words = [*module, *flags, "--port", "0"]
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        server = ServerProcess(words, Path(folder), fresh, max_files)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
                server.process.wait()


Stream = tuple[httpx.Client, httpx.Response]


def start_long_stream(server: ServerProcess) -> Stream:
    """Start a stream and wait for its status, so that the request decodes."""
    client = httpx.Client(timeout=patience())
    body = {"model": "tiny", "prompt": "one two three", "max_tokens": 2000, "stream": True}
    body |= {"ignore_eos": True}
    request = client.build_request("POST", server.url + "/v1/completions", json=body)
    response = client.send(request, stream=True)
    assert response.status_code == 200
    return client, response


def assert_told(stream: Stream, lost: bool) -> None:
    """The client of the stream receives an error, or loses its connection."""
    client, response = stream
    with contextlib.closing(client):
        if lost:
            with pytest.raises(httpx.TransportError):
                response.read()
        else:
            assert '{"error":{"message":"the service has failed' in response.read().decode()
            assert response.text.endswith("data: [DONE]\n\n")
