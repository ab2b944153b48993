"""Prometheus scrapes the real server under load: every dashboard expression finds finite data.

The alert rules load and stay silent. The tests use the Prometheus of Debian.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.chart.helm import pick
from tests.chart.test_promql import DASHBOARDS, expressions_of
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for
from tests.process.prometheus import needs_prometheus, prometheus_on

pytestmark = [pytest.mark.process, pytest.mark.slow, needs_prometheus]
MODEL = "minisgl-demo"
PAUSE_S = 0.1  # between two requests of a client


@contextlib.contextmanager
def load_on(server: ServerProcess) -> Iterator[None]:
    """Runs streams, long prompts, grammars, cancelled streams and refused requests meanwhile."""
    stop = threading.Event()
    url = server.url + "/v1/completions"
    counter = itertools.count()

    def body(tokens: int, length: int) -> dict[str, object]:
        first = next(counter) % 200 + 5
        prompt = [first, *([first + 1] * length)]
        return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}

    def work(kind: int) -> None:
        with httpx.Client(timeout=patience()) as client:
            # Without a pause the load would take all CPU time between two scrapes.
            while not stop.wait(PAUSE_S):
                if kind == 0:
                    client.post(url, json=body(60, 10))
                elif kind == 1:
                    client.post(url, json=body(4, 700))
                elif kind == 2:
                    client.post(url, json={**body(4, 5), "n": 50})  # fills the queue
                elif kind == 3:
                    client.post(url, json={**body(20, 5), "regex": "[ab]{1,9}"})
                else:
                    with client.stream("POST", url, json={**body(60, 5), "stream": True}) as parts:
                        next(parts.iter_bytes())

    threads = [threading.Thread(target=work, args=(kind,)) for kind in (0, 0, 1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_dashboards_and_rules_on_the_real_server(
    render: Callable[..., object], tmp_path: Path
) -> None:
    values = {"prometheusRule": {"enabled": True}}
    rules = pick(render(values), "PrometheusRule")["spec"]  # type: ignore[arg-type]
    expressions = [expr for path in DASHBOARDS for expr in expressions_of(path)]
    assert len(expressions) > 20
    labels = {"namespace": "llm", "pod": "minisgl-0"}
    with (
        run_server("--max-queued-requests", "50", "--num-pages", "512") as server,
        prometheus_on(server.wait_ready(), tmp_path, labels, rules) as prometheus,
        load_on(server),
    ):
        missing = list(expressions)

        def all_finite() -> bool:
            finite = "count(({}) > -Inf < Inf) > 0"
            missing[:] = [e for e in missing if not prometheus.ask(finite.format(e))]
            return not missing

        try:
            wait_for(all_finite, "finite data in every panel")
        finally:
            assert not missing, missing
        refused = "sum(rate(minisgl_requests_rejected_total[1m])) > 0"
        wait_for(
            lambda: prometheus.ask(refused), "refused requests while another one fills the queue"
        )
        used = 'last_over_time(minisgl_kv_cache_tokens{state="used"}[5m])'
        assert prometheus.ask(used)[0] < 512 * 16

        def evaluated() -> list[dict[str, object]]:
            groups = prometheus.get("rules")["groups"]
            found = [rule for group in groups for rule in group["rules"]]
            return found if all(rule["health"] != "unknown" for rule in found) else []

        found = wait_for(evaluated, "an evaluation of every rule")
        assert len(found) == sum(len(group["rules"]) for group in rules["groups"])
        assert {rule["health"] for rule in found} == {"ok"}
        assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []
