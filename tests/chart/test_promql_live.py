"""Every expression of the dashboards finds finite data on the real server under load, and the alert
rules load and stay silent there; judged by Debian's Prometheus."""

import contextlib
import itertools
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.chart.helm import pick
from tests.chart.test_promql import DASHBOARDS, expressions_of
from tests.process.harness import ServerProcess, run_server, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus (Debian package prometheus) is not installed",
    ),
]
MODEL = "minisgl-demo"
Ask = Callable[[str], list[float]]


@contextlib.contextmanager
def load_on(server: ServerProcess) -> Iterator[None]:
    """Streams, long prompts beside them, broken-off streams and refusals, until the end."""
    stop = threading.Event()
    url = server.url + "/v1/completions"
    counter = itertools.count()

    def body(tokens: int, length: int) -> dict[str, object]:
        first = next(counter) % 200 + 5
        prompt = [first, *([first + 1] * length)]
        return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}

    def work(kind: int) -> None:
        with httpx.Client(timeout=60) as client:
            while not stop.is_set():
                if kind == 0:
                    client.post(url, json=body(60, 10))
                elif kind == 1:
                    client.post(url, json=body(4, 700))
                elif kind == 2:
                    client.post(url, json={**body(4, 5), "n": 50})  # all that the queue takes
                else:
                    with client.stream("POST", url, json={**body(60, 5), "stream": True}) as parts:
                        next(parts.iter_bytes())

    threads = [threading.Thread(target=work, args=(kind,)) for kind in (0, 0, 1, 2, 3)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def prometheus_on(server: ServerProcess, rules: dict[str, object], folder: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes `server` as the chart's monitor would."""
    (folder / "rules.yml").write_text(yaml.safe_dump(rules))
    labels = {"namespace": "llm", "pod": "minisgl-0", "job": "minisgl"}
    target = {"targets": [server.url.removeprefix("http://")], "labels": labels}
    job = {"job_name": "minisgl", "scrape_interval": "200ms", "scrape_timeout": "200ms"}
    config = {
        "global": {"evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{**job, "static_configs": [target]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder}", f"--web.listen-address=127.0.0.1:{port}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def test_dashboards_and_rules_on_the_real_server(
    render: Callable[..., object], tmp_path: Path
) -> None:
    values = {"prometheusRule": {"enabled": True}}
    rules = pick(render(values), "PrometheusRule")["spec"]  # type: ignore[arg-type]
    expressions = [expr for path in DASHBOARDS for expr in expressions_of(path)]
    assert len(expressions) > 20
    with (
        run_server("--max-queued-requests", "50", "--num-pages", "512") as server,
        prometheus_on(server.wait_ready(), rules, tmp_path) as url,
        load_on(server),
    ):

        def ask(query: str) -> list[float]:
            try:
                answer = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=10)
            except httpx.TransportError:
                return []
            found = answer.json().get("data", {}).get("result", []) if answer.is_success else []
            return [float(series["value"][1]) for series in found]

        missing = list(expressions)

        def all_finite() -> bool:
            missing[:] = [e for e in missing if not ask(f"count(({e}) > -Inf < Inf) > 0")]
            return not missing

        try:
            wait_for(all_finite, "finite data in every panel", deadline_s=60)
        finally:
            assert not missing, missing
        refused = "sum(rate(minisgl_requests_rejected_total[1m])) > 0"
        wait_for(lambda: ask(refused), "calls refused beside one that fills the queue")
        assert ask('max(minisgl_kv_cache_tokens{state="used"})')[0] < 512 * 16

        def evaluated() -> list[dict[str, object]]:
            groups = httpx.get(f"{url}/api/v1/rules").json()["data"]["groups"]
            found = [rule for group in groups for rule in group["rules"]]
            return found if all(rule["health"] != "unknown" for rule in found) else []

        found = wait_for(evaluated, "an evaluation of every rule")
        assert len(found) == sum(len(group["rules"]) for group in rules["groups"])
        assert {rule["health"] for rule in found} == {"ok"}
        assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []
