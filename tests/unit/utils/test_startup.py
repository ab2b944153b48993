"""The durations of a start, and the progress of a phase where stderr is no terminal."""

import logging

import pytest

from minisgl.utils import startup
from minisgl.utils.startup import Progress, Stopwatch, startup_table, whole_start


def test_compiling_counts_once_within_another_phase() -> None:
    compiled = [0.0]
    watch = Stopwatch(lambda: compiled[0])
    with watch.phase("graphs"):
        compiled[0] = 1000.0
    assert watch.seconds["compile"] == 1000.0
    assert -1000.0 < watch.seconds["graphs"] < 0.0, "the clock of this test stood still"


def test_rows_add_up_to_the_total() -> None:
    whole = whole_start({"import": 1.0, "weights": 2.0}, 5.0)
    assert whole["processes"] == 2.0
    assert (next(iter(whole)), list(whole)[-1]) == ("processes", "total")
    title, heads, seconds = startup_table(whole).splitlines()
    assert len(title) < len(heads) == len(seconds) == 68
    assert seconds.split()[:2] == ["2.00", "1.00"]
    longer = startup_table(whole | {"total": 125.0}).splitlines()[2]
    assert len(longer) == 68
    assert longer.endswith("  125")


def test_progress_is_a_log_line_where_stderr_is_no_terminal(
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with caplog.at_level(logging.INFO, logger="minisgl"):
        assert list(Progress(range(3), desc="short")) == [0, 1, 2]
        assert not caplog.messages, "work of less than 10 s logs nothing"
        monkeypatch.setattr(startup, "_LOG_INTERVAL_S", 0.0)
        assert list(Progress(range(3), desc="long")) == [0, 1, 2]
        assert not list(Progress([], desc="other rank", disable=True))
    assert any(line.startswith("long:") and "2/3" in line for line in caplog.messages)
    assert not any("rank" in line for line in caplog.messages)
    assert capfd.readouterr().err == ""
