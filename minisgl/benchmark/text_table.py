"""The tables of the benchmarks: aligned columns of text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any


class TextTable:
    """Formats the rows of one table. A benchmark prints each row as soon as it is measured.

    head  the line of the headings.
    """

    def __init__(self, columns: Mapping[str, str]) -> None:
        """columns: headings, and the format of the values of each, such as "<48" or ">9.1f"."""
        self._formats = [*columns.values()]
        self.head = self.row(*columns)

    def row(self, *values: str | float) -> str:
        """Return a line. A text in a column of numbers keeps the width of the column."""
        pairs = zip(values, self._formats, strict=True)
        return " ".join(
            format(value, _width(spec) if isinstance(value, str) else spec) for value, spec in pairs
        ).rstrip()


def named_rows(heading: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table whose first column, under `heading`, has the rows' names.

    rows: each has a "name", and figures by column. A row without a figure leaves its place empty.
    """
    columns = [*dict.fromkeys(column for row in rows for column in row if column != "name")]
    table = TextTable({heading: "<48"} | dict.fromkeys(columns, ">9.2f"))
    lines = [table.row(row["name"], *(row.get(each, "") for each in columns)) for row in rows]
    return [table.head, *lines]


def _width(spec: str) -> str:
    found = re.match(r"[<>]\d+", spec)
    assert found is not None, f"the format {spec!r} must begin with < or > and a width"
    return found[0]
