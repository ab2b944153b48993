"""Goodput, the search for the least number of replicas, and the command."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.benchmark.cli import main
from minisgl.benchmark.client import Answer
from minisgl.benchmark.fleet.fleet import FleetResult, ReplicaCount
from minisgl.benchmark.fleet.report import Objective, least_replicas, make_run, row
from minisgl.core import ConfigError

GOAL = Objective(ttft_s=1.0, itl_s=0.1, share=0.5)


@given(st.integers(1, 200), st.integers(1, 200))
def test_the_search_finds_the_threshold_with_few_runs(least: int, most: int) -> None:
    tried: list[int] = []

    def meets(replicas: int) -> bool:
        tried.append(replicas)
        return replicas >= least

    assert least_replicas(meets, most) == (least if least <= most else None)
    assert len(tried) == len(set(tried)) <= 2 * most.bit_length()
    assert all(1 <= replicas <= most for replicas in tried)


@pytest.mark.parametrize(
    ("outputs_s", "error", "good"),
    [
        ([1.0], None, True),
        ([1.01], None, False),
        ([0.5, 0.6, 0.7], None, True),
        ([0.5, 0.51, 0.7], None, True),  # the mean of the gaps counts
        ([0.5, 0.6, 0.71], None, False),
        ([], "lost", False),
        ([0.5, 0.6], "lost", False),
    ],
)
def test_a_good_request_is_within_both_limits(
    outputs_s: list[float], error: str | None, good: bool
) -> None:
    assert GOAL.is_good(Answer(0.0, outputs_s, error=error)) == good


def test_a_run_counts_good_requests_and_the_hours_of_all_replicas() -> None:
    answers = [
        Answer(0.0, [0.5, 0.6], prompt_tokens=10, cached_tokens=5, output_tokens=2),
        Answer(0.0, [4.0], prompt_tokens=10, output_tokens=1),
        Answer(0.0, prompt_tokens=10, error="lost"),
    ]
    counts = [ReplicaCount(0.0, 1, 1), ReplicaCount(1800.0, 1, 3)]
    run = make_run("precise", 1, FleetResult(answers, 2, counts, seconds=3600.0), GOAL)
    assert run.summary["good_share"] == pytest.approx(1 / 3)
    assert run.summary["goodput_per_s"] == pytest.approx(1 / 4.0)
    assert not run.summary["meets_objective"]
    assert run.summary["replica_hours"] == pytest.approx(0.5 + 1.5)
    assert (run.summary["failed"], run.summary["resent"]) == (1, 2)
    assert "33.33%" in row(run)


SMALL = "--requests 30 --rate 20 --prompt-tokens 20 60 --output-tokens 5 20 --cost 0,0,1:10,9999:10"


def test_the_command_writes_table_json_and_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = f"fleet {SMALL} --replicas 2 --router round-robin precise --fail-at 0.2 --start-s 0.3"
    files = ["--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]
    assert main([*row.split(), "--retries", "1", *files]) == 0
    header, first, changes, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["router", "replicas", "good"]
    assert first.split()[:2] == ["round-robin", "2"]
    assert changes == "  ready/all replicas: 0 s 2/2, 0 s 1/2, 0 s 2/2"
    found = json.loads((tmp_path / "a.json").read_text())
    assert [run["router"] for run in found["runs"]] == ["round-robin", "precise"]
    assert found["settings"]["mixed_factor"] == 1.035
    assert found["runs"][0]["failed"] == 0 < found["runs"][0]["resent"]
    assert found["runs"][0]["replicas_over_time"][1] == {"at_s": 0.2, "ready": 1, "total": 2}
    texts = [node.text for node in ElementTree.parse(tmp_path / "a.svg").iter() if node.text]
    assert "round-robin, 2 replicas" in texts
    assert texts.count("REPLICAS") == 2


def test_the_command_searches_and_tells_failure_by_its_status(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A step takes 10 ms, so one request has an ITL of 10.3 ms on any number of replicas."""
    search = f"fleet {SMALL} --find-replicas 4 --max-running-requests 2 --ttft-ms 60".split()
    assert main([*search, "--router", "least-load"]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = int(lines[-1].removeprefix("  least-load: ").removesuffix(" replicas"))
    assert 1 < found <= 4
    shares = {int(cells[1]): cells[2] for cells in map(str.split, lines[1:-1])}
    assert float(shares[found].rstrip("%")) >= 99 > float(shares[found - 1].rstrip("%"))
    assert main([*search, "--itl-ms", "9"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "  approximate: more than 4 replicas"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("", "needs --rate or --trace"),
        ("--rate 1 --beside 1 1 1", "takes no --beside"),
        ("--rate 1 --autoscale 2 4", "MIN <= --replicas <= MAX"),
        ("--rate 1 --autoscale 1 4 --find-replicas 3", "neither --find-replicas"),
        ("--rate 1 --autoscale 1 4 --rollout-at 3", "nor --rollout-at"),
    ],
)
def test_flags_that_contradict_are_refused(flags: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        main(["fleet", "--requests", "2", *flags.split()])


def test_a_rate_replaces_the_times_of_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = '{"timestamp": 0, "input_length": 20, "output_length": 2, "hash_ids": [1]}'
    (tmp_path / "trace").write_text("\n".join([line] * 5))
    flags = f"fleet --trace {tmp_path / 'trace'} --json {tmp_path / 'out'} --rate 0.1".split()
    assert main([*flags, "--arrival", "uniform"]) == 0
    [run] = json.loads((tmp_path / "out").read_text())["runs"]
    assert run["seconds"] == pytest.approx(40.0, abs=0.1)
    assert "approximate" in capsys.readouterr().out
