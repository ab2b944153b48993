"""Runs Debian's Prometheus on the server of a test."""

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import patience
from tests.process.harness import ServerProcess, wait_for

__all__ = ["Prometheus", "needs_prometheus", "prometheus_on"]

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus (Debian package prometheus) is not installed",
)


class Prometheus:
    """A running Prometheus, by its HTTP API."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of a response. Fails with the text of an error."""
        answer = self._client.get(f"/api/v1/{path}", params=parameters)
        assert answer.is_success, answer.text
        return answer.json()["data"]

    def ask(self, query: str) -> list[float]:
        """The values of all series of a query."""
        return [float(series["value"][1]) for series in self.get("query", query=query)["result"]]


@contextlib.contextmanager
def prometheus_on(
    server: ServerProcess, folder: Path, labels: Mapping[str, str], rules: object = None
) -> Iterator[Prometheus]:
    """Scrape `server` and evaluate `rules` each second, with these labels."""
    (folder / "rules.yml").write_text(json.dumps(rules or {}))  # JSON is also YAML
    target = {"targets": [server.url.removeprefix("http://")], "labels": dict(labels)}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "minisgl", "static_configs": [target]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder}", "--web.listen-address=127.0.0.1:0"]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)

    def address() -> re.Match[str] | None:
        text = log.read_text()
        assert process.poll() is None, text
        return re.search(r'msg="Listening on".* address=(\S+)', text)

    try:
        url = f"http://{wait_for(address, 'the address of Prometheus')[1]}"
        with httpx.Client(base_url=url, timeout=patience()) as client:
            wait_for(lambda: client.get("/-/ready").is_success, "its readiness")
            yield Prometheus(client)
    finally:
        process.kill()
        process.wait()
