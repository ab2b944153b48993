"""Starts a server for a benchmark as users start one, and reads its metrics."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from minisgl.benchmark.models import SHAPES, write_model
from minisgl.core import ConfigError

_URL = re.compile(r"listening on (https?://\S+)")
_SAMPLE = re.compile(r"^(minisgl_\w+?)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(phase|state)="(\w+)"')
_READY_WITHIN_S = 600.0  # the first start compiles kernels
_ENDS_WITHIN_S = 30.0


class OwnServer(NamedTuple):
    """ready_s: from the start of the command to the first 200 of /readyz."""

    url: str
    ready_s: float


@contextlib.contextmanager
def own_server(
    model: str, flags: Sequence[str], log_path: Path | None = None
) -> Iterator[OwnServer]:
    """A server of one of SHAPES with random weights, or of a model folder, on a free port.

    log_path: where its log is kept. Raises ConfigError, with the log's end, when it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-bench-") as folder:
        arguments = ["--model", model]
        if model in SHAPES:
            path = write_model(model, Path(folder) / "model", full_vocabulary=True)
            arguments = ["--model", path, "--served-model-name", model, "--dummy-weight"]
        arguments += ["--port", "0", "--drain-grace", "0", "--drain-timeout", "5", *flags]
        command = [sys.executable, "-m", "minisgl", *arguments]
        log = log_path or Path(folder) / "log"
        began_s = time.monotonic()
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            url = _wait_ready(process, log)
            yield OwnServer(url, time.monotonic() - began_s)
        finally:
            stop(process, _ENDS_WITHIN_S)


def stop(process: "subprocess.Popen[bytes]", within_s: float) -> None:
    """SIGTERM, and SIGKILL to one that has not ended in time: it would keep the GPU's memory."""
    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_ready(process: "subprocess.Popen[bytes]", log: Path) -> str:
    deadline_s = time.monotonic() + _READY_WITHIN_S
    while True:
        found = _URL.search(text := log.read_text(errors="replace"))
        if found and _is_ready(found[1]):
            return found[1]
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise ConfigError(f"the server did not start; its log ends:\n{text[-3000:]}")
        time.sleep(0.05)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(ConfigError):
        fetch(url + "/readyz")
        return True
    return False


def fetch(url: str, api_key: str | None = None) -> bytes:
    """The body of a GET. Raises ConfigError when there is none."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"{url} cannot be read: {error}") from None


def read_metrics(url: str, api_key: str | None = None) -> dict[str, float]:
    """What /metrics says, by name and phase or state: {"name": value, "name:decode": value}.

    {} for a server of another kind.
    """
    try:
        text = fetch(url + "/metrics", api_key).decode()
    except ConfigError:
        return {}
    values: dict[str, float] = {}
    for line in text.splitlines():
        if sample := _SAMPLE.match(line):
            label = _LABEL.search(sample[2] or "")
            values[sample[1] + (f":{label[2]}" if label else "")] = float(sample[3])
    return values
