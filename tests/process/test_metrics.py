"""The demo server with known prompts: the value of every counter is known."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from minisgl.demo import model_path
from tests.patience import patience
from tests.process.harness import ServerProcess, run_server, wait_for
from tests.process.prometheus import needs_prometheus, prometheus_on

pytestmark = pytest.mark.process

MODEL = "minisgl-demo"
LONG = [10 + i % 50 for i in range(40)]  # two and a half pages of 16 tokens
SHORT = [70 + i for i in range(10)]  # less than a page, so that none of it is cached


class Scrape(dict[str, float]):
    """The result of `ServerProcess.metrics`, with sums."""

    @classmethod
    def of(cls, server: ServerProcess) -> "Scrape":
        return cls(server.metrics())

    def total(self, name: str) -> float:
        """The sum over all labels."""
        return sum(value for key, value in self.items() if key.split("{")[0] == name)

    def outcomes(self) -> dict[str, float]:
        return {o: self[f"requests_total{{outcome={o}}}"] for o in ("stop", "length", "abort")}


def post(server: ServerProcess, **body: object) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **body}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=patience())


def complete(server: ServerProcess, prompt: list[int], max_tokens: int, **more: object) -> None:
    options = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
    answer = post(server, **options)
    assert answer.status_code == 200, answer.text


@pytest.fixture(scope="module")
def used() -> Iterator[tuple[ServerProcess, Scrape]]:
    """A server that has given four answers to three calls and is now idle, and its scrape."""
    flags = ("--num-pages", "256", "--max-queued-requests", "2", "--log-format", "json")
    flags += ("--drain-grace", "0")
    with run_server(*flags) as server:
        server.wait_ready()
        complete(server, LONG, 5)
        complete(server, LONG, 5, stream=True)
        complete(server, SHORT, 3, n=2)

        def settled() -> Scrape | None:
            found = Scrape.of(server)
            is_idle = not (found["kv_cache_usage_ratio"] or found["http_requests_in_flight"])
            return found if is_idle and found["prefix_cache_query_tokens_total"] == 100 else None

        yield server, wait_for(settled, "the scheduler's last stats")
        server.signal(signal.SIGTERM)
        assert server.wait_exit() == 0
        last = [json.loads(line) for line in server.stderr.splitlines()][-1]
        assert {"time", "level", "role", "message"} <= last.keys(), "also at the shutdown"


def test_tokens_of_known_prompts(used: tuple[ServerProcess, Scrape]) -> None:
    _, found = used
    assert found["prompt_tokens_total"] == 40 + 40 + 10, "a prompt counts once, as in usage"
    assert found["generation_tokens_total"] == 5 + 5 + 3 + 3
    assert found["prefix_cache_hit_tokens_total"] == 32
    assert found["prefix_cache_hit_ratio"] == 0.32
    assert found["request_prompt_tokens_sum"] == 100
    assert found["request_generation_tokens_bucket{le=5.0}"] == 4
    assert found["request_generation_tokens_bucket{le=2.0}"] == 0


def test_each_duration_was_observed_once_per_answer(used: tuple[ServerProcess, Scrape]) -> None:
    _, found = used
    for name in ("time_to_first_token", "request_queue", "request_prefill", "request_decode"):
        assert found[f"{name}_seconds_count"] == 4, name
    assert found["request_duration_seconds_count"] == 4
    assert found["time_per_output_token_seconds_count"] == 4
    parts = ("request_queue", "request_prefill", "request_decode")
    whole = sum(found[f"{part}_seconds_sum"] for part in parts)
    assert whole == pytest.approx(found["request_duration_seconds_sum"])
    # Text of a token may be held back, so there are at most as many gaps as tokens.
    assert 4 <= found["inter_token_latency_seconds_count"] <= 16 - 4


def test_forward_passes_of_known_prompts(used: tuple[ServerProcess, Scrape]) -> None:
    """Passes compute prompts without hits, and generated tokens without the last of each answer."""
    _, found = used
    assert found.total("batch_tokens_sum") == 100 - 32 + 16 - 4
    assert found.total("batch_size_sum") == 16
    assert found.total("batch_size_count") == found.total("forward_passes_total")
    by_graph = [found[key] for key in found if "cuda_graph=true" in key]
    assert by_graph == [0, 0, 0], "no graphs on CPU"
    assert found.total("forward_seconds_total") > 0


def test_gauges_of_an_idle_server(used: tuple[ServerProcess, Scrape]) -> None:
    _, found = used
    assert (found["requests_running"], found["requests_waiting"]) == (0, 0)
    assert (found["kv_cache_usage_ratio"], found["kv_cache_tokens{state=used}"]) == (0, 0)
    assert (found["kv_cache_pages"], found["kv_cache_page_size_tokens"]) == (256, 16)
    assert found.total("kv_cache_tokens") == 256 * 16
    assert found["kv_cache_tokens{state=evictable}"] == 32, "two whole pages of the long prompt"
    assert (found["ready"], found["draining"], found["http_requests_in_flight"]) == (1, 0, 0)
    for name in ("preemptions_total", "nonfinite_rows_total", "prefix_cache_evicted_tokens_total"):
        assert found[name] == 0
    phases = {key for key in found if key.startswith("startup_seconds{")}
    total_s = found["startup_seconds{phase=total}"]
    assert len(phases) == 9
    assert sum(found[phase] for phase in phases) == pytest.approx(2 * total_s), "rows and total"
    busy = ("import", "weights", "warm_up", "processes")
    assert all(found[f"startup_seconds{{phase={phase}}}"] > 0 for phase in busy)
    assert found["startup_seconds{phase=compile}"] == 0, "no GPU"
    assert found["scheduler_last_step_timestamp_seconds"] > found["process_start_time_seconds"]


def test_build_info_has_the_commit_of_the_checkout(used: tuple[ServerProcess, Scrape]) -> None:
    root = Path(__file__).resolve().parents[2]
    asked = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True)
    (info,) = [key for key in used[1] if key.startswith("build_info")]
    assert f"commit={asked.stdout.strip() or 'unknown'}" in info


def test_outcomes_and_refusals(used: tuple[ServerProcess, Scrape]) -> None:
    """An end by EOS, an abort and three kinds of refusal add to the counts so far."""
    server, found = used
    assert found.outcomes() == {"stop": 0, "length": 4, "abort": 0}
    eos = json.loads((model_path() / "config.json").read_text())["eos_token_id"]
    eos = eos[0] if isinstance(eos, list) else eos
    complete(server, SHORT, 5, ignore_eos=False, logit_bias={str(eos): 100})
    assert post(server, prompt=SHORT, n=3).status_code == 400, "more than the queue ever takes"
    assert post(server, prompt=SHORT, temperature=9).status_code == 400
    assert post(server, prompt=SHORT, model="none").status_code == 404
    body = {"model": MODEL, "prompt": SHORT, "max_tokens": 500, "stream": True, "ignore_eos": True}
    url = server.url + "/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=patience()) as stream:
        next(stream.iter_bytes())

    def aborted() -> Scrape | None:
        found = Scrape.of(server)
        return found if found["requests_total{outcome=abort}"] else None

    found = wait_for(aborted, "the abort")
    assert found.outcomes() == {"stop": 1, "length": 4, "abort": 1}
    assert found["requests_total{outcome=error}"] == 0
    assert found["requests_total{outcome=rejected}"] == 0, "no refusal has a Retry-After"
    codes = {
        key.split("code=")[1].split(",")[0]: value
        for key, value in found.items()
        if key.startswith("http_requests_total") and "/v1/completions" in key
    }
    assert codes == {"200": 5, "400": 2, "404": 1}
    assert found["request_duration_seconds_count"] == 5, "an aborted request adds no latency sample"


def test_metrics_are_answered_while_loading(tiny_model: Path) -> None:
    with run_server("--model", str(tiny_model), stub="loading") as server:
        wait_for(lambda: server.status("/livez") == 200, "the API server")
        assert post(server, prompt="x").status_code == 503
        found = Scrape.of(server)
    assert (found["ready"], found["requests_rejected_total{reason=loading}"]) == (0, 1)


QUERIES = {
    "up": 1,
    "minisgl_prompt_tokens_total - minisgl_prompt_tokens_total": 0,
    'sum by (model_name) (minisgl_requests_total{outcome="length"})': 4,
    "minisgl_prefix_cache_hit_tokens_total / minisgl_prefix_cache_query_tokens_total > 0": None,
    "histogram_quantile(0.95, sum by (le) (minisgl_time_to_first_token_seconds_bucket))": None,
    "minisgl_kv_cache_pages * minisgl_kv_cache_page_size_tokens": 4096,
    "time() - process_start_time_seconds": None,
}


@needs_prometheus
def test_prometheus_itself_scrapes_and_answers(
    used: tuple[ServerProcess, Scrape], tmp_path: Path
) -> None:
    """Prometheus asks for OpenMetrics first. A wanted value of None means any finite number."""
    with prometheus_on(used[0], tmp_path, {}) as prometheus:
        for query, wanted in QUERIES.items():

            def answered(query: str = query, wanted: float | None = wanted) -> bool:
                values = prometheus.ask(query)
                finite = len(values) == 1 and abs(values[0]) < 1e12
                return finite and wanted in (None, values[0])

            wait_for(answered, f"{wanted} from {query}")


def test_json_logs_are_one_object_per_line_with_the_request_id(
    used: tuple[ServerProcess, Scrape],
) -> None:
    """The log has one refusal for each reason and second, also of the tests before this one."""
    server, _ = used
    secret = "xylophone"
    body = {"model": MODEL, "messages": [{"role": "user", "content": secret}], "max_tokens": 3}

    def is_logged_as(request_id: str, text: dict[str, object]) -> bool:
        url, header = server.url + "/v1/chat/completions", {"x-request-id": request_id}
        httpx.post(url, json=text, headers=header, timeout=patience())
        return f'"{request_id}"' in server.stderr

    wait_for(lambda: is_logged_as("abc-1", body), "the line of an answer")
    wait_for(lambda: is_logged_as("abc-2", {**body, "model": secret}), "the line of a refusal")
    written = server.stderr.splitlines(keepends=True)
    lines = [json.loads(line) for line in written if line.endswith("\n")]
    assert server.stdout == ""
    assert secret not in server.stderr
    assert all({"time", "level", "role", "message"} <= line.keys() for line in lines)
    by_id = {line["request_id"]: line for line in lines if "request_id" in line}
    ended, refused = by_id["abc-1"], by_id["abc-2"]
    assert ended["message"].startswith("call ended ")
    assert 1 <= ended["completion_tokens"] <= 3
    assert ended["finish"] in ("length", "stop")
    assert ended["ttft_s"] <= ended["duration_s"]
    assert (refused["status"], refused["reason"]) == (404, "ModelNotFound")
    assert any("minisgl serves" in line["message"] for line in lines)
