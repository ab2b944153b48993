"""Reads the tables of docs/operations.md and the metric names of PromQL expressions."""

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["OPERATIONS", "Metric", "headings", "metrics", "names_in", "rows", "unknown_in"]

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"
_SERIES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("",), "gauge": ("",)}
_ADDED_BY_SCRAPE = {"namespace", "pod", "le"}


class Metric(NamedTuple):
    """One row of the metric table."""

    name: str
    type: str
    labels: frozenset[str]

    @property
    def series(self) -> set[str]:
        """The names of its series."""
        return {self.name + suffix for suffix in _SERIES[self.type]}


def rows(first_cell: str) -> list[list[str]]:
    """The rows of the table whose header starts with that cell."""
    text = OPERATIONS.read_text()
    _, _, below = text.partition(f"\n| {first_cell} |")
    lines = below.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def metrics() -> dict[str, Metric]:
    """The rows of the metric table, by metric name."""
    found = {}
    for name, kind, labels, _meaning in rows("name"):
        names = {label.strip() for label in labels.split(",") if label.strip()}
        renamed = {"model_name" if label == "model" else label for label in names}
        metric = Metric(name.strip("`"), kind, frozenset(renamed))
        found[metric.name] = metric
    return found


def headings() -> set[str]:
    """The anchors that GitHub and GitLab make of one-word headings."""
    return {h.lower() for h in re.findall(r"^#+ (\w+)$", OPERATIONS.read_text(), re.M)}


def names_in(expr: str) -> set[str]:
    """The metric names in an expression."""
    return set(re.findall(r"\b(?:minisgl|process)_\w+", expr))


def unknown_in(expr: str) -> list[str]:
    """The series and labels of an expression that the metric table lacks."""
    series = {s: metric for metric in metrics().values() for s in metric.series}
    wrong = sorted(names_in(expr) - series.keys())
    for name, matchers in re.findall(r"\b(\w+)\{([^}]*)\}", expr):
        used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", matchers))
        if name in series:
            allowed = series[name].labels | _ADDED_BY_SCRAPE
            wrong += [f"{name}{{{label}}}" for label in sorted(used - allowed)]
    grouped = {
        label.strip() for part in re.findall(r"by \(([^)]*)\)", expr) for label in part.split(",")
    }
    allowed = frozenset().union(*(series[n].labels for n in names_in(expr) & series.keys()))
    return wrong + [f"by {label}" for label in sorted(grouped - allowed - _ADDED_BY_SCRAPE)]
