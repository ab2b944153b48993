"""Campaigns: their rows, their commands, the budget, and the record of each row."""

import contextlib
import json
import subprocess
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from bench import campaign, runner
from bench.campaign import Campaign, main
from bench.campaign_plan import read_plan, rows_of, values_of
from bench.clocks import Clocks, cpu_shares
from bench.records import read_records
from minisgl.benchmark.server_process import RunningServer
from minisgl.core import ConfigError
from tests.patience import patience

ONLINE = {
    "ttft_s": {"p50": 0.2, "p99": 0.3},
    "tpot_s": {"p50": 0.01},
    "itl_s": {"p50": 0.01, "p99": 0.02},
    "output_tokens_per_s": 50.0,
    "requests_per_s": 2.0,
}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that a campaign runs. Each of them prints the JSON of `bench online`."""
    found: list[list[str]] = []

    def run(words: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        found.append(words[2:])
        code = 1 if "--concurrency 16 " in " ".join(words) else 0
        return subprocess.CompletedProcess(words, code, f"a table\n{json.dumps(ONLINE)}\n")

    @contextlib.contextmanager
    def start(model: str, flags: Sequence[str]) -> Iterator[RunningServer]:
        found.append(["server", model, *flags])
        yield RunningServer("http://host", 1.0)

    monkeypatch.setattr(runner.subprocess, "run", run)
    monkeypatch.setattr(campaign, "start_server", start)
    return found


def test_every_campaign_has_rows_with_different_names() -> None:
    plan = read_plan()
    assert set(plan.campaigns) == {"peers", "agents", "latency", "start", "quality"}
    for name in plan.campaigns:
        labels = [row.name + str(row.program.own_caches) for row in rows_of(plan, name)]
        assert len(labels) == len(set(labels))


@pytest.mark.parametrize("name", sorted(read_plan().campaigns))
def test_every_row_has_a_command_of_its_own(name: str) -> None:
    """Regression: warm and cold starts had one command, so the record of one was lost."""
    campaign = Campaign(Namespace(budget=1.0, model=None, smoke=False))
    shown = [campaign.shown(row) for row in rows_of(read_plan(), name)]
    assert len(shown) == len(set(shown))
    if name == "start":
        caches = "TRITON_CACHE_DIR=$(mktemp -d) FLASHINFER_WORKSPACE_BASE=$(mktemp -d) minisgl "
        assert [line.startswith(caches) for line in shown] == [False, True] * 2


def test_rows_are_chosen_by_a_text_or_by_their_whole_name() -> None:
    def names(*only: str, named: list[str] | None = None) -> list[str]:
        return [row.name for row in rows_of(read_plan(), "peers", only, named or [])]

    assert names(named=["Qwen3-8B"]) == ["Qwen3-8B"]
    assert names("Qwen3-8B, 8,192 in, 1,024 out, 64", named=["Qwen3-0.6B"]) == [
        "Qwen3-8B, 8,192 in, 1,024 out, 64 at once",
        "Qwen3-0.6B",
    ]
    assert len(names("Qwen3-8B")) > len(names("Qwen3-8B, README"))
    with pytest.raises(
        ConfigError, match="no row of peers is named \\['Qwen3-9B', 'Qwen'\\]; rows"
    ):
        names("Qwen3-9B", "Qwen3-8B", named=["Qwen"])


def test_rows_are_limited_to_points() -> None:
    rows = rows_of(read_plan(), "start", at=["warm"])
    assert [(row.name, row.at) for row in rows] == [("Qwen3-8B", "warm"), ("Qwen3-0.6B", "warm")]
    with pytest.raises(ConfigError, match="no point of start is named \\['tepid'\\]; points"):
        rows_of(read_plan(), "start", at=["warm", "tepid"])


def test_the_latency_curve_has_eight_loads_or_more() -> None:
    rows = rows_of(read_plan(), "latency")
    assert len({row.point.values.get("offered_per_s") for row in rows} - {None}) >= 8


def test_columns_have_the_units_of_their_names() -> None:
    row = rows_of(read_plan(), "latency", ["4 requests"])[0]
    values = values_of(row, ONLINE)
    assert values["offered_per_s"] == 4
    assert values["first_token_p99_ms"] == pytest.approx(300)
    with pytest.raises(ConfigError, match="has no number itl_s/p50, so there is no gap_p50_ms"):
        values_of(row, ONLINE | {"itl_s": {}})


def test_points_of_a_subject_share_a_server_and_failures_keep_other_rows(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ["--only", "FP8 weights and KV, 8,192 in, 1,024 out, 1", "--commit", "abc"]
    assert main(["peers", *only, "--results", str(tmp_path)]) == 1
    assert [words[0] for words in commands] == ["server", "minisgl", "minisgl"]
    assert commands[0][1:] == ["qwen3-8b", "--quantization", "fp8", "--kv-cache-dtype", "fp8"]
    assert all(words[1:5] == ["bench", "online", "--url", "http://host"] for words in commands[1:])
    assert "16 at once: the program in" in capsys.readouterr().out
    (record,) = read_records("peers", tmp_path)
    assert record.commit == "abc"
    assert "--model qwen3-8b" in record.command
    assert record.figures[0].values["token_p50_ms"] == 10


def test_a_row_that_does_not_fit_in_the_budget_is_skipped(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path), "--commit", "abc"]
    assert main(["latency", "--url", "http://host", "--budget", "45", *results]) == 1
    assert "1 request a second: not in the budget" in capsys.readouterr().out
    assert len(commands) == 10
    assert main(["latency", "--budget", "50", *results]) == 1  # a server takes 40 s to start
    assert len(commands) == 10


def test_another_engine_is_measured_at_its_url(commands: list[list[str]], tmp_path: Path) -> None:
    flags = ["--url", "http://other", "--engine", "vLLM 0.23.0", "--results", str(tmp_path)]
    assert main(["latency", "--only", "4 requests", *flags]) == 0
    assert commands[0][:5] == ["minisgl", "bench", "online", "--url", "http://other"]
    (record,) = read_records("latency", tmp_path)
    assert (record.engine, record.commit) == ("vLLM", "0.23.0")


def test_the_number_of_runs_is_in_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    times_s = iter([9.0, 5.0, 1.0, 8.0, 6.0])
    monkeypatch.setattr(campaign, "output_of", lambda *_, **__: f'{{"ready_s": {next(times_s)}}}')
    flags = ["--row", "Qwen3-8B", "--point", "warm", "--commit", "abc", "--results", str(tmp_path)]
    for more, median_s, note in (
        ([], 5.0, "medians of 3 runs"),
        (["--repeat", "2"], 7.0, "medians of 2 runs"),
    ):
        assert main(["start", *flags, *more]) == 0
        (record,) = read_records("start", tmp_path)
        assert record.figures[0].values["warm_s"] == median_s
        assert record.figures[0].note == note


def test_more_runs_need_more_of_the_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The row is expected to take 30 s with its three runs."""
    monkeypatch.setattr(campaign, "output_of", lambda *_, **__: '{"ready_s": 5}')
    flags = ["start", "--row", "Qwen3-8B", "--point", "warm", "--budget", "25", "--commit", "abc"]
    flags += ["--results", str(tmp_path)]
    assert main([*flags, "--repeat", "2"]) == 0
    assert main(flags) == 1
    assert "no result: Qwen3-8B: not in the budget" in capsys.readouterr().out


def test_a_row_of_sessions_replays_the_trace_of_its_point(
    commands: list[list[str]], tmp_path: Path
) -> None:
    flags = ["--only", "Qwen3-8B, 64", "--results", str(tmp_path), "--commit", "abc"]
    main(["agents", *flags])
    _, maker, replay = commands
    assert maker[:3] == ["bench", "trace", "--live"]
    assert Path(replay[replay.index("--trace") + 1]).name == "agents.jsonl"
    row = rows_of(read_plan(), "agents", ["Qwen3-8B, 64"])[0]
    shown = Campaign(Namespace(budget=1.0, model=None, smoke=False)).shown(row)
    assert shown.startswith("python -m bench trace --live 64")
    assert "> agents.jsonl && minisgl bench online --model qwen3-8b --trace agents.jsonl" in shown


def test_shares_of_cpu_time_follow_from_two_readings() -> None:
    found = cpu_shares("cpu 100 0 0 100 0 0 0 0\ncpu0 1", "cpu 130 0 10 150 0 0 0 10\ncpu0 2")
    assert found == {"cpu_busy_percent": 40, "cpu_stolen_percent": 10}


def test_only_visible_gpus_are_sampled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Regression: a row on one GPU of four had the clocks and the power of all four."""
    program, written = tmp_path / "nvidia-smi", tmp_path / "written"
    program.write_text(f'#!/bin/sh\necho "$@" > {written}.new\nmv {written}.new {written}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    until_s = time.monotonic() + patience()
    with Clocks().sampled():
        while not written.exists():
            assert time.monotonic() < until_s, "the program does not start"
            time.sleep(0.01)
    assert "--id=2,3" in written.read_text().split()


def has_ended(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def put_smi(monkeypatch: pytest.MonkeyPatch, folder: Path, lines: str) -> None:
    """Let a shell script of these lines take the place of nvidia-smi."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def values_once(written: Path) -> dict[str, float]:
    """The values of a row that ends when the file is there."""
    clocks, until_s = Clocks(), time.monotonic() + patience()
    with clocks.sampled():
        while not written.exists():
            assert time.monotonic() < until_s, "nvidia-smi does not write the file"
            time.sleep(0.01)
    return clocks.values()


def test_a_row_of_an_unknown_gpu_has_no_values_of_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: an unknown GPU ended a measured row with a ValueError."""
    started = tmp_path / "started"
    lines = f"echo $$ > {started}.new\nmv {started}.new {started}\necho No devices were found"
    put_smi(monkeypatch, tmp_path, f"{lines}\nexit 6")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-unknown")
    clocks, until_s = Clocks(), time.monotonic() + patience()
    with clocks.sampled():
        while not (started.exists() and has_ended(int(started.read_text()))):
            assert time.monotonic() < until_s, "the program does not end"
            time.sleep(0.01)
    assert not any(name.startswith("gpu") for name in clocks.values())
    assert capsys.readouterr().err == "nvidia-smi ended with 6: No devices were found\n"


def test_without_visible_gpus_none_is_sampled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: an empty CUDA_VISIBLE_DEVICES meant all GPUs."""
    put_smi(monkeypatch, tmp_path, "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("nvidia-smi started"))
    with Clocks().sampled():
        pass


def test_a_gpu_that_does_not_measure_its_power_has_its_clock(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: "[N/A]" ended a measured row with a ValueError."""
    written = tmp_path / "written"
    put_smi(monkeypatch, tmp_path, f"echo 1980, [N/A], 40\n: > {written}\nexec sleep 600")
    values = values_once(written)
    assert (values["gpu_min_mhz"], values["gpu_min_c"]) == (1980, 40)
    assert "gpu_min_w" not in values


def test_gpu_samples_beyond_the_size_of_a_pipe_are_all_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: nvidia-smi stopped at a full pipe, and a long row had samples of its start."""
    written = tmp_path / "written"
    lines = "head -c 131072 /dev/zero | tr '\\0' '1' | fold -w 4"
    put_smi(monkeypatch, tmp_path, f"{lines}\necho\necho 7\n: > {written}\nexec sleep 600")
    values = values_once(written)
    assert (values["gpu_p50_mhz"], values["gpu_min_mhz"]) == (1111, 7)
