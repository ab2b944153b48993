"""The tables of the benchmarks: aligned columns of text."""

import re
from collections.abc import Mapping


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


def _width(spec: str) -> str:
    found = re.match(r"[<>]\d+", spec)
    assert found is not None, f"the format {spec!r} must begin with < or > and a width"
    return found[0]
