"""docs/bugs.md lists each known bug once. The documentation names only tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| W(\d+) \| .+? \| (.+) \|$", re.MULTILINE)


def rows() -> list[tuple[int, str]]:
    text = (ROOT / "docs/bugs.md").read_text(encoding="utf-8")
    return [(int(number), held_by) for number, held_by in _ROW.findall(text)]


def test_every_known_bug_has_one_row() -> None:
    assert [number for number, _ in rows()] == list(range(1, 40))


def test_every_known_bug_names_a_test() -> None:
    assert [n for n, by in rows() if not re.search(r"`test_\w+`", by)] == []


def test_every_named_test_exists() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py")]
    defined = set(re.findall(r"def (test_\w+)", "\n".join(sources)))
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`(test_\w+)`", page)}
    named -= {path.stem for path in (ROOT / "tests").rglob("test_*.py")}  # names of whole files
    assert named - defined == set()
