"""Tables of named rows. Each row may have other figures."""

from collections.abc import Mapping, Sequence
from typing import Any

from minisgl.benchmark.text_table import TextTable


def named_rows(heading: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of a table whose first column, under `heading`, has the rows' names.

    rows: each has a "name", and figures by column. A row without a figure leaves its place empty.
    """
    columns = [*dict.fromkeys(column for row in rows for column in row if column != "name")]
    table = TextTable({heading: "<48"} | dict.fromkeys(columns, ">9.2f"))
    lines = [table.row(row["name"], *(row.get(each, "") for each in columns)) for row in rows]
    return [table.head, *lines]
