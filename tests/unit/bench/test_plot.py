"""The pictures of the benchmarks page follow from bench/results."""

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from bench.plot import (
    _LEFT,
    ALL,
    PICTURES,
    Curve,
    Group,
    Panel,
    Picture,
    Series,
    draw,
    drawing,
    groups_of,
    lines_of,
    main,
)
from bench.records import RESULTS, Figure, Record, read_records, write_record
from minisgl.core import ConfigError

PICTURE = Picture("peers", "title", (Series("ours", "a_ms"), Series("theirs", "a_ms", "other")))


def record(value: float | None, engine: str = "minisgl", command: str = "c") -> Record:
    return Record(
        date="2026-11-22",
        engine=engine,
        commit="",
        machine="m",
        versions={},
        command=command,
        figures=[Figure("one & two", {"a_ms": value})],
    )


@pytest.mark.parametrize("picture", ALL, ids=[picture.results for picture in ALL])
def test_committed_pictures_are_those_of_the_committed_results(picture: Picture | Curve) -> None:
    """After a change of the results, `python -m bench plot` draws the pictures again."""
    drawn = drawing(picture, read_records(picture.results))
    assert (PICTURES / f"{picture.results}.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_committed_results_are_records(path: Path) -> None:
    for found in read_records(path.stem):
        assert found.machine
        assert found.command
        assert found.figures


def test_newer_records_replace_values_and_engines_are_series() -> None:
    records = [record(1.0), record(3.0, "other"), record(2.0), record(None), record(4.0, "third")]
    assert groups_of(PICTURE, records) == [Group("one & two", [(0, 2.0), (1, 3.0)])]


def test_the_longest_bar_has_the_largest_value() -> None:
    text = draw(PICTURE, [Group("one & two", [(0, 2.0), (1, 8.0)])])
    bars = [
        float(rect.attrib["width"])
        for rect in ElementTree.fromstring(text)
        if rect.attrib.get("x") == str(_LEFT)
    ]
    assert bars == [pytest.approx(max(bars) / 4, abs=0.1), max(bars)]


def test_the_picture_has_room_for_the_longest_name() -> None:
    """Regression: the name of the row of agents began left of the picture."""
    drawn = draw(PICTURE, [Group("n" * 65, [(0, 1.0)]), Group("b", [(0, 2.0)])])
    texts = [each for each in ElementTree.fromstring(drawn).iter() if each.text == "n" * 65]
    assert [float(each.attrib["x"]) >= 65 * 7 for each in texts] == [True]


def test_a_curve_has_the_newest_value_of_each_load_from_left_to_right() -> None:
    panel = Panel("ms", (Series("median", "a_ms"), Series("p99", "b_ms")))
    curve = Curve("latency", "title", "offered_per_s", "requests a second", (panel, panel))

    def at(load: float | None, value: float) -> Record:
        figure = Figure("f", {"offered_per_s": load, "a_ms": value, "b_ms": 10 * value})
        return msgspec.structs.replace(record(None), figures=[figure])

    records = [at(8.0, 5.0), at(2.0, 1.0), at(None, 3.0), at(8.0, 4.0)]
    lines = [[(2.0, 1.0), (8.0, 4.0)], [(2.0, 10.0), (8.0, 40.0)]]
    assert lines_of(curve, panel, records) == lines
    drawn = drawing(curve, records)
    assert drawn is not None
    marks = [mark for mark in ElementTree.fromstring(drawn) if mark.tag.endswith("circle")]
    assert len(marks) == 8
    assert float(marks[0].attrib["cy"]) > float(marks[1].attrib["cy"])  # larger values are above
    assert drawing(curve, [at(None, 3.0)]) is None


def test_a_picture_without_values_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record("peers", record(1.0), tmp_path)
    assert main(["--results", str(tmp_path), "--pictures", str(tmp_path / "drawn")]) == 1
    assert "start.svg: not drawn, because the results have no value" in capsys.readouterr().err
    assert not (tmp_path / "drawn" / "start.svg").exists()


def test_a_record_replaces_that_of_the_same_command_and_machine(tmp_path: Path) -> None:
    for each in (record(1.0), record(1.0, command="d"), record(2.0)):
        write_record("peers", each, tmp_path)
    values = [found.figures[0].values["a_ms"] for found in read_records("peers", tmp_path)]
    assert values == [1.0, 2.0]


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    (tmp_path / "peers.json").write_text('{"date": 1}')
    with pytest.raises(ConfigError, match=r"peers\.json does not hold records of a benchmark"):
        read_records("peers", tmp_path)
