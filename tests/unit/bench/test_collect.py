"""Results of several folders become records of bench/results and rows of a Markdown table."""

from pathlib import Path

import pytest

from bench.collect import main
from bench.records import Figure, Record, read_records, write_record
from minisgl.core import ConfigError


def record(
    value: float | None, command: str = "minisgl bench offline", date: str = "2026-11-28"
) -> Record:
    return Record(
        date=date,
        commit="abc",
        machine="1 x GPU",
        versions={},
        command=command,
        figures=[Figure("Qwen3-8B", {"tokens_per_s": value, "seconds": 2.0}, "warm")],
    )


def test_records_of_all_folders_are_added_and_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    write_record("peers", record(1.0), results)
    write_record("peers", record(10432.1), tmp_path / "a")
    write_record("peers", record(None, "other"), tmp_path / "b")
    write_record("start", record(3.0), tmp_path / "b")
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--results", str(results)]) == 0
    assert read_records("peers", results) == [record(10432.1), record(None, "other")]
    assert read_records("start", results) == [record(3.0)]
    assert capsys.readouterr().out.splitlines() == [
        "| benchmark | row | date | code | machine | result | command |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| peers | Qwen3-8B | 2026-11-28 | abc | 1 x GPU | tokens_per_s 10432; seconds 2 (warm) | "
        "`minisgl bench offline` |",
        "| peers | Qwen3-8B | 2026-11-28 | abc | 1 x GPU | tokens_per_s -; seconds 2 (warm) | "
        "`other` |",
        "| start | Qwen3-8B | 2026-11-28 | abc | 1 x GPU | tokens_per_s 3; seconds 2 (warm) | "
        "`minisgl bench offline` |",
    ]


def test_the_record_with_the_later_date_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Regression: the folder named last replaced newer records."""
    results, new, old = (tmp_path / name for name in ("results", "new", "old"))
    write_record("peers", record(1.0, date="2026-11-25"), results)
    write_record("peers", record(2.0), new)
    write_record("peers", record(3.0, date="2026-11-20"), old)
    assert main([str(new), str(old), "--results", str(results)]) == 0
    assert read_records("peers", results) == [record(2.0)]
    shown = capsys.readouterr()
    assert [line.split(" | ")[2:6:3] for line in shown.out.splitlines()[2:]] == [
        ["2026-11-28", "tokens_per_s 2; seconds 2 (warm)"]
    ] * 2
    assert shown.err == "peers: kept 2026-11-28, not 2026-11-20: minisgl bench offline\n"


def test_a_bar_in_a_command_does_not_end_the_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record("peers", record(1.0, "a | b"), tmp_path / "a")
    assert main([str(tmp_path / "a"), "--results", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(r"| `a \| b` |")


def test_a_folder_without_results_changes_nothing(tmp_path: Path) -> None:
    write_record("peers", record(1.0), tmp_path / "a")
    (tmp_path / "b").mkdir()
    with pytest.raises(ConfigError, match="b has no results of benchmarks"):
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--results", str(tmp_path / "results")])
    (tmp_path / "b" / "start.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not hold records of a benchmark"):
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--results", str(tmp_path / "results")])
    assert not (tmp_path / "results").exists()
