"""The longest steps of streams follow from the times of their tokens."""

import json
from pathlib import Path

import pytest

from bench.gaps import main
from minisgl.core import ConfigError


def run_of(long_steps: int, steps: int = 300) -> dict[str, object]:
    """A run of 3 streams with steps of 10 ms, and one long step of 30 ms after each of some sends.

    A prompt is sent every 0.5 s and has its first token 0.2 s later. A long step begins 20 ms
    after the send. The tokens of a step arrive within 1 ms.
    """
    sent_s = [0.5 * n for n in range(6)]
    ends_s, now_s, left = [], -0.5, sent_s[:long_steps]
    for _ in range(steps):
        long = bool(left) and now_s > left[0] + 0.015
        now_s += 0.03 if long else 0.01
        left = left[1:] if long else left
        ends_s.append(now_s)
    return {
        "settings": {"rate": 2},
        "requests": [{"sent_s": at_s, "outputs_s": [at_s + 0.2], "ttft_s": 0.2} for at_s in sent_s],
        "streams": [
            {"sent_s": -1.0, "outputs_s": [at_s + 0.0005 * stream for at_s in ends_s]}
            for stream in range(3)
        ],
    }


def found_in(path: Path, run: object, capsys: pytest.CaptureFixture[str], *flags: str) -> dict:
    path.write_text(json.dumps(run), encoding="utf-8")
    assert main([str(path), *flags]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_long_steps_have_their_place_beside_the_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = found_in(tmp_path / "run.json", run_of(2), capsys, "--steps", "2")
    assert found["p50_ms"] == pytest.approx(10)
    for row in found["longest"]:
        assert row["step"] == pytest.approx(30)
        assert row["next step"] == pytest.approx(10)
        assert row["after the send"] == pytest.approx(50, abs=5)
        assert row["after the send"] + row["before the token"] == pytest.approx(200)


@pytest.mark.parametrize(("long_steps", "p99_ms"), [(2, 10), (3, 30)])
def test_the_p99_is_that_of_a_long_step_if_these_are_one_percent(
    long_steps: int, p99_ms: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts are open for 2.7 s, some 265 steps."""
    found = found_in(tmp_path / "run.json", run_of(long_steps), capsys)
    assert found["place_of_p99"] == 3
    assert found["p99_ms"] == pytest.approx(p99_ms)


def test_the_last_step_has_no_next_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = found_in(tmp_path / "run.json", run_of(0), capsys, "--steps", "999")["longest"]
    assert ["next step" in row for row in rows] == [True] * (len(rows) - 1) + [False]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"streams": []}, "give --beside and --samples"),
        ({"requests": [{"sent_s": 0.0}]}, "give --beside and --samples"),
        ({"requests": None}, "no file of minisgl bench online"),
        ({"requests": [{"sent_s": 90.0, "outputs_s": [91.0]}]}, "while a prompt is open"),
    ],
)
def test_a_file_without_these_samples_is_refused(
    change: dict[str, object], error: str, tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run_of(0) | change), encoding="utf-8")
    with pytest.raises(ConfigError, match=error):
        main([str(tmp_path / "run.json")])
