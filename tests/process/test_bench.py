"""`minisgl bench online` and `python -m bench server` as users run them, on the CPU."""

import json
import subprocess
from pathlib import Path

import httpx
import pytest

from minisgl.benchmark import cli
from minisgl.demo import model_path
from minisgl.utils import startup
from tests.forks import run_forked
from tests.patience import patience
from tests.process.harness import ServerProcess

pytestmark = pytest.mark.process

LOAD = ["--largest-id", "1200", "--quiet"]


def bench(*flags: str) -> "subprocess.CompletedProcess[str]":
    return run_forked(["minisgl", "bench", "online", *LOAD, *flags], timeout=patience(120))


def test_one_command_starts_a_server_and_measures_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 600, "output_length": 6, "hash_ids": [1, 2]}
    later = {**request, "timestamp": 4000, "hash_ids": [1, 3]}
    trace.write_text(f"{json.dumps(request)}\n{json.dumps(later)}\n")
    found, plot = tmp_path / "found.json", tmp_path / "plot.svg"
    files = ["--trace", str(trace), "--json", str(found), "--plot", str(plot)]
    server = ["--model", str(model_path()), "--", "--num-pages", "300"]
    done = bench("--time-scale", "0.5", *files, *server)
    assert done.returncode == 0, done.stderr
    summary = json.loads(found.read_text())["summary"]
    assert summary == json.loads(done.stdout.splitlines()[-1])
    assert (summary["requests"], summary["failed"], summary["output_tokens"]) == (2, 0, 12)
    assert summary["cached_tokens"] == 512
    assert summary["ideal_hit_ratio"] == summary["prefix_hit_ratio"] == pytest.approx(512 / 1200)
    assert summary["seconds"] >= 2
    assert 0 < summary["ttft_s"]["p50"] <= summary["e2e_s"]["p50"]
    assert plot.read_text().startswith("<svg")


def test_bench_server_measures_the_api_process() -> None:
    words = ["bench", "server", "--streams", "4", "--tokens", "5"]
    done = run_forked(words, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["streams"] == 4
    assert 4 <= found["events"] <= 20, "a busy machine puts the tokens of several steps in an event"
    assert found["events_per_cpu_s"] > 0


def test_bench_host_hits_finds_each_prompt_in_its_place(tiny_model: Path) -> None:
    """The benchmark itself fails if a prompt is not where it should be."""
    words = ["bench", "host_hits", "--model", str(tiny_model), "--part", "server"]
    load = ["--prompt", "512", "--streams", "2", "--repeats", "1", "--seconds", "0.5"]
    done = run_forked([*words, *load], timeout=patience(180))
    assert done.returncode == 0, done.stderr
    found = {row["name"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}
    ready, beside = found["host hit ready"], found["gaps of 2 streams, host hits"]
    pages, page_bytes = 512 // 16 - 1, 16 * 2 * 2 * 16 * 4  # in float32; 2 layers of one KV head
    assert ready["GB"] == pages * page_bytes / 1e9
    assert ready["stored_GB"] == 0
    assert beside["to_gpu"] > 0
    assert beside["to_host"] > 0
    assert found["gaps of 2 streams, GPU hits"]["to_gpu"] == 0


def test_a_server_that_does_not_start_gives_one_error_with_its_reason() -> None:
    done = bench("--model", str(model_path()), "--", "--page-size", "7")
    assert done.returncode == 2
    assert "7 is not a power of two" in done.stderr
    assert "Traceback" not in done.stderr


def test_prompts_have_ids_that_the_server_knows(real_server: ServerProcess) -> None:
    """Regression: ids beyond the vocabulary of a small model made every request fail."""
    words = ["minisgl", "bench", "online", "--url", real_server.url]
    load = ["--requests", "2", "--prompt-tokens", "8", "8", "--output-tokens", "2", "2"]
    done = run_forked([*words, *load], timeout=patience(120))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["failed"], summary["output_tokens"]) == (0, 4)
    size = httpx.get(real_server.url + "/tokenizer_info").json()["vocab_size"]
    assert f"the largest id in prompts is {size - 1}; --chat sends text" in done.stderr


def test_bench_writes_no_progress_bar_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "_LOG_INTERVAL_S", 0.0)
    flags = ["--device", "cpu", "--requests", "3", "--prompt-tokens", "4", "9"]
    flags += ["--output-tokens", "2", "4"]
    assert cli.main(["offline", "--model", str(model_path()), *flags]) == 0
    errors = capfd.readouterr().err
    assert "\r" not in errors
    lines = errors.splitlines()
    assert all(" INFO " in line for line in lines), lines
    assert any("minisgl.utils.startup: " in line and "/3" in line for line in lines), lines
