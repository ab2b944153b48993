"""docs/bugs.md names every weakness once, and only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| W(\d+) \| .+? \| (.+) \|$", re.MULTILINE)


def rows() -> list[tuple[int, str]]:
    text = (ROOT / "docs/bugs.md").read_text(encoding="utf-8")
    return [(int(number), held_by) for number, held_by in _ROW.findall(text)]


def test_every_weakness_has_its_row() -> None:
    assert [number for number, _ in rows()] == list(range(1, 40))


def test_every_named_test_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = set(re.findall(r"def (test_\w+)", "\n".join(sources)))
    for number, held_by in rows():
        if held_by == "GPU only":
            continue
        named = re.findall(r"`(test_\w+)`", held_by)
        assert named, f"W{number} names no test"
        assert set(named) <= defined, f"W{number}: {set(named) - defined} do not exist"
