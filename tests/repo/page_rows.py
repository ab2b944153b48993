"""The rows of the tables of docs/benchmarks.md, with the commands that repeat them.

A table has a column `command` or `flags`. Its cells hold code: a whole command; flags, which follow
the command that the section names by "flags follow `COMMAND`"; or `…` with flags, which continue
the command of the row above. `{a,b}` stands for several runs, and `[--flag]` for one run with the
flag and one without. A cell without code repeats the command of the section, has the letter of a
command in the section's text, or has a link to the command.
"""

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

_CODE = re.compile(r"`([^`]+)`")
_BASE = re.compile(r"flags follow `([^`]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")
_LETTER = re.compile(r"[A-Z](?=;|$)")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}|\[([^\[\]]*)\]")


class PageRow(NamedTuple):
    """A row of a table.

    name      the text of its first cell.
    commands  all that its cell stands for.
    letter    of a command in the text of the section; "" for none.
    links     targets of the links in its cell.
    """

    name: str
    commands: list[str]
    letter: str
    links: list[str]


def rows(text: str) -> Iterator[PageRow]:
    """Yield the rows of all tables with a column of commands or flags."""
    for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        named = _BASE.search(section)
        base = " ".join(named[1].split()) if named else ""
        for lines in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
            head, _, *cells = [_cells(line) for line in lines.splitlines()]
            column = next((head.index(name) for name in ("command", "flags") if name in head), None)
            if column is not None:
                yield from _table(cells, column, base)


def _table(cells: list[list[str]], column: int, base: str) -> Iterator[PageRow]:
    above = base
    for row in cells:
        cell = row[column]
        code = _CODE.findall(cell)
        whole = [_whole(each, base, above) for each in code]
        if not cell:
            whole = [base]
        above = whole[0] if whole else above
        named = _LETTER.match(cell)
        letter, links = named[0] if named else "", _LINK.findall(cell)
        yield PageRow(row[0], [run for each in whole for run in runs(each)], letter, links)


def _whole(code: str, base: str, above: str) -> str:
    if code.startswith("…"):
        return f"{above} {code[1:]}".strip()
    return f"{base} {code}" if code.startswith("-") else code


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip().strip("|"))
    return [cell.strip().replace(r"\|", "|") for cell in cells]


def runs(command: str) -> Iterator[str]:
    """Yield the commands that braces and brackets stand for."""
    found = _CHOICE.search(command)
    if found is None:
        yield " ".join(command.split())
        return
    several, optional = found.groups()
    values = several.split(",") if several is not None else [optional, ""]
    parts = (command[: found.start()] + value + command[found.end() :] for value in values)
    yield from itertools.chain.from_iterable(map(runs, parts))
