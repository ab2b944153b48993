"""Starts a server for a benchmark with the command `minisgl`, and reads its metrics."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from minisgl.benchmark.models import SHAPES, write_model
from minisgl.core import ConfigError

_URL = re.compile(r"listening on (https?://\S+)")
_PROBE_URL = re.compile(r"listening for probes on (https?://\S+)")
_SAMPLE = re.compile(r"^(minisgl_\w+?)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(?:phase|state|direction)="(\w+)"')
_START_TIMEOUT_S = 600.0  # the first start compiles kernels
_STOP_TIMEOUT_S = 30.0


class RunningServer(NamedTuple):
    """ready_s: seconds from the start of the command to the first 200 of /readyz.

    probe_url: of --probe-port; without that flag, the same as url.
    """

    url: str
    ready_s: float
    probe_url: str = ""


@contextlib.contextmanager
def start_server(
    model: str,
    flags: Sequence[str],
    log_path: Path | None = None,
    before: Callable[[], None] | None = None,
) -> Iterator[RunningServer]:
    """Start a server on a free port, and stop it at the end of the `with` block.

    model: a name in SHAPES (with random weights) or a model folder. flags: additional flags of the
    command. log_path: file for the server's log. before: called in the process of the server
    before its command. Raises ConfigError, with the end of the log, if the server does not start.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        arguments = ["--model", model]
        if model in SHAPES:
            path = write_model(model, Path(folder) / "model", full_vocabulary=True)
            arguments = ["--model", path, "--served-model-name", model, "--dummy-weight"]
        arguments += ["--port", "0", "--drain-grace", "0", "--drain-timeout", "5", *flags]
        command = [sys.executable, "-m", "minisgl", *arguments]
        log = log_path or Path(folder) / "log"
        started_s = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out, preexec_fn=before)
        try:
            url, probe_url = _wait_ready(process, log)
            yield RunningServer(url, time.monotonic() - started_s, probe_url)
        finally:
            stop(process, _STOP_TIMEOUT_S)


def stop(process: "subprocess.Popen[bytes]", within_s: float) -> None:
    """Send SIGTERM. After `within_s` send SIGKILL, because the process holds GPU memory."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> tuple[str, str]:
    """Wait until the server is ready. Returns its URL and the URL of its probe port."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        text = log.read_text(errors="replace")
        url = _URL.search(text)
        probe_url = _PROBE_URL.search(text) or url
        if url and probe_url and _is_ready(probe_url[1]):
            return url[1], probe_url[1]
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise ConfigError(f"the server did not start; its log ends:\n{text[-3000:]}")
        time.sleep(0.05)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(ConfigError):
        fetch(url + "/readyz")
        return True
    return False


def fetch(url: str, api_key: str | None = None) -> bytes:
    """Return the body of a GET request. Raises ConfigError when it fails."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from None


def read_metrics(url: str, api_key: str | None = None) -> dict[str, float]:
    """Return the samples of /metrics as {"name": value, "name:decode": value}.

    The part after the colon is the sample's label `phase`, `state` or `direction`. Returns {} when
    the server has no /metrics.
    """
    try:
        text = fetch(url + "/metrics", api_key).decode()
    except ConfigError:
        return {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if sample := _SAMPLE.match(line):
            label = _LABEL.search(sample[2] or "")
            values[sample[1] + (f":{label[1]}" if label else "")] = float(sample[3])
    return values
