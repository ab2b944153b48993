"""Runs containers on the available Docker engine."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import httpx

from tests.patience import patience
from tests.process.harness import wait_for

__all__ = ["Container", "docker", "inspect", "running", "why_no_docker"]

PORT = 1919
# As strict as the chart's security context, with an additional limit on processes.
LOCKED = ("--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--pids-limit", "256")


def docker(*words: str, timeout_s: float = 120) -> str:
    """Runs a docker command and returns its stdout. Fails with the whole output."""
    done = subprocess.run(
        ["docker", *words], capture_output=True, text=True, timeout=patience(timeout_s)
    )
    assert done.returncode == 0, f"docker {' '.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def inspect(name: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = json.loads(docker("inspect", name))
    return found[0]


def why_no_docker() -> str | None:
    """The reason why containers cannot run here, or None if an engine answers."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=patience(30))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the docker command does not work: {error}"
    return f"no Docker engine answers: {done.stderr.strip()}" if done.returncode else None


class Container:
    """A running container whose port is published on the loopback interface."""

    def __init__(self, image: str, options: tuple[str, ...], flags: tuple[str, ...]) -> None:
        publish = ("--publish", f"127.0.0.1::{PORT}")
        self._started_s = time.monotonic()
        self.id = docker("run", "--detach", *LOCKED, *publish, *options, image, *flags).strip()
        self.url = ""
        self.ready_s = 0.0

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = inspect(self.id)["State"]
        return state

    @property
    def logs(self) -> str:
        done = subprocess.run(["docker", "logs", self.id], capture_output=True, text=True)
        return done.stdout + done.stderr

    def status(self, path: str) -> int:
        """The HTTP status of a probe; 0 when nothing answers."""
        try:
            return httpx.get(self.url + path, timeout=patience(10)).status_code
        except httpx.TransportError:
            return 0

    def wait_ready(self) -> "Container":
        bound = inspect(self.id)["NetworkSettings"]["Ports"].get(f"{PORT}/tcp", [])
        assert [b["HostIp"] for b in bound] == ["127.0.0.1"], f"it ended: {self.logs}"
        self.url = f"http://127.0.0.1:{bound[0]['HostPort']}"

        def ready() -> bool:
            assert self.state["Running"], self.logs
            return self.status("/readyz") == 200

        wait_for(ready, "readiness")
        self.ready_s = time.monotonic() - self._started_s
        return self

    def ask(self, question: str) -> str:
        """The answer of the demo model over HTTP."""
        messages = [{"role": "user", "content": question}]
        body = {"model": "minisgl-demo", "messages": messages, "temperature": 0}
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=patience())
        assert answer.status_code == 200, answer.text
        content: str = answer.json()["choices"][0]["message"]["content"]
        return content

    def execute(self, code: str) -> str:
        """Runs Python code inside the container and returns its output."""
        return docker("exec", self.id, "python3", "-c", code).strip()

    def wait_exit(self, deadline_s: float) -> int:
        docker("wait", self.id, timeout_s=deadline_s)
        code: int = self.state["ExitCode"]
        return code


@contextlib.contextmanager
def running(image: str, *flags: str, options: tuple[str, ...] = ()) -> Iterator[Container]:
    """Yields a ready container and removes it afterwards."""
    container = Container(image, options, flags)
    try:
        yield container.wait_ready()
    finally:
        docker("rm", "--force", "--volumes", container.id)
