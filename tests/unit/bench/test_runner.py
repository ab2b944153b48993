"""Repeated runs of a benchmark: the numbers of their JSON, and the comparison of two checkouts."""

import json
import subprocess
from pathlib import Path

import pytest

from bench import __main__ as command
from bench import runner
from bench.records import Figure
from minisgl.utils.supervise import CONFIG_EXIT


@pytest.mark.parametrize(
    ("found", "figures"),
    [
        ([{"name": "decode", "median_s": 2.0}], [Figure("decode", {"median_s": 2.0})]),
        ({"rows": [["mask", 1.5, 2.0]]}, [Figure("mask", {"1": 1.5, "2": 2.0})]),
        ({"step_s": 1, "fp8": True, "tp": None}, [Figure("x", {"step_s": 1.0})]),
        ({"nothing": {"p50": 3.0}}, [Figure("x, nothing", {"p50": 3.0})]),
    ],
    ids=["objects with names", "rows", "one object", "objects by name"],
)
def test_the_numbers_of_a_benchmark_are_figures(found: object, figures: list[Figure]) -> None:
    assert list(runner.figures_of("x", found)) == figures


def test_runs_alternate_and_medians_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bench").mkdir()
    times = iter([1.0, 4.0, 3.0, 4.0, 2.0, 5.0])
    folders = []

    def run(words: list[str], cwd: Path, **_: object) -> "subprocess.CompletedProcess[str]":
        folders.append(cwd)
        line = json.dumps({"step_s": next(times)})
        return subprocess.CompletedProcess(words, 0, f"a table\n{line}\n")

    monkeypatch.setattr(runner.subprocess, "run", run)
    assert command.main(["--repeat", "3", "--against", str(tmp_path), "step"]) == 0
    assert folders == [runner.ROOT, tmp_path] * 3
    line = capsys.readouterr().out.split()
    assert line == ["step", "step_s", "2", "(1", "to", "3)", "4", "(4", "to", "5)", "-50.0%"]


def test_a_failed_run_ends_the_repetition(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, "")
    monkeypatch.setattr(runner.subprocess, "run", lambda *_, **__: failed)
    assert command.main(["--repeat", "2", "step"]) == CONFIG_EXIT
    assert "ended with the exit code 1" in capsys.readouterr().err


def test_programs_of_a_checkout_find_packages_where_this_process_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Regression: a campaign whose dependencies were in PYTHONPATH started programs without it."""
    monkeypatch.setenv("PYTHONPATH", "/site")
    (tmp_path / "show.py").write_text("import os; print(os.environ['PYTHONPATH'], os.getcwd())")
    assert runner.output_of(["show"], tmp_path).split() == [f"{tmp_path}:/site", str(tmp_path)]
