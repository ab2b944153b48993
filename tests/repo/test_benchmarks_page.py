"""Each row of a table of docs/benchmarks.md has a command beside it that its program accepts."""

import re
from argparse import Namespace
from pathlib import Path

import pytest

from bench.campaign import Campaign
from bench.campaign_plan import read_plan, rows_of
from minisgl.core import ConfigError
from tests.command_lines import parse
from tests.repo import rules
from tests.repo.page_rows import PageRow, rows, runs

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
TEXT = PAGE.read_text(encoding="utf-8")
ROWS = list(rows(TEXT))

PLANTED = r"""
## Steps

The flags follow `minisgl bench
offline`.

| model | result | flags |
|---|---|---|
| a | 1 | `--repeat 3` |
| b | 1 | `… [--model qwen3-{0.6b,8b}]` |
| c | 1 | |
| d | 1 | `python -m bench step` |
| e | 1 | `…` |
| f | 1 | [page](a.md#b) |
| g | 1 | C; [page](a.md) |
| h | 1 | `python -m bench step \| cat` |
"""


def test_rows_are_read_with_all_commands_that_they_stand_for() -> None:
    offline = "minisgl bench offline"
    assert list(rows(PLANTED)) == [
        PageRow("a", [f"{offline} --repeat 3"], "", []),
        PageRow(
            "b",
            [
                f"{offline} --repeat 3 --model qwen3-0.6b",
                f"{offline} --repeat 3 --model qwen3-8b",
                f"{offline} --repeat 3",
            ],
            "",
            [],
        ),
        PageRow("c", [offline], "", []),
        PageRow("d", ["python -m bench step"], "", []),
        PageRow("e", ["python -m bench step"], "", []),
        PageRow("f", [], "", ["a.md#b"]),
        PageRow("g", [], "C", ["a.md"]),
        PageRow("h", ["python -m bench step | cat"], "", []),
    ]


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("minisgl bench offline --no-such-flag 1", SystemExit),
        ("minisgl bench offline --model qwen9", AssertionError),
        ("minisgl bench online --model qwen3-8b -- --no-such-flag", SystemExit),
        ("minisgl bench no-such-benchmark", ModuleNotFoundError),
        ("python -m bench host_hits --part steps --no-such-flag", SystemExit),
        ("python -m bench images --streams 0", SystemExit),
        ("python -m bench campaign peers --only qwen9", ConfigError),
        ("python train.py", AssertionError),
    ],
)
def test_a_wrong_command_is_refused(command: str, error: type[BaseException]) -> None:
    with pytest.raises(error):
        parse(command)


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 60


@pytest.mark.parametrize("command", sorted({c for row in ROWS for c in row.commands}))
def test_the_command_of_a_row_is_accepted(command: str) -> None:
    options = parse(command)
    trace = getattr(options, "trace", None)
    assert trace is None or (ROOT / trace).is_file()


@pytest.mark.parametrize("row", [row for row in ROWS if not row.commands], ids=lambda r: r.name)
def test_a_row_without_code_names_a_command_elsewhere(row: PageRow) -> None:
    """A letter stands for a file of `make proof`; a link leads to a section with commands."""
    if row.letter:
        file = re.search(rf"(test_\w+\.py)\s\({row.letter}[;)]", TEXT)
        assert file, f"the text names no file of {row.letter}"
        assert (ROOT / "tests" / "proof" / file[1]).is_file()
        return
    assert row.links, f"{row.name}: no command"
    for target in row.links:
        name, _, anchor = target.partition("#")
        text = (PAGE.parent / name).read_text(encoding="utf-8") if name else TEXT
        text = rules.section(text, anchor)
        assert re.search(r"(?:minisgl|python -m) bench \w+ -", text), target


@pytest.mark.parametrize("name", sorted(read_plan().campaigns))
def test_the_commands_of_a_campaign_are_accepted(name: str) -> None:
    campaign = Campaign(Namespace(budget=1.0, model=None, smoke=False))
    for row in rows_of(read_plan(), name):
        for command in campaign.shown(row).split(" && "):
            for run in runs(command.removesuffix(" > agents.jsonl")):
                parse(run)
