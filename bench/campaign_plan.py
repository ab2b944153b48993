"""The rows of a campaign: programs, points and subjects of bench/campaigns.toml."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from minisgl.core import ConfigError

_PLAN = Path(__file__).with_name("campaigns.toml")


class Program(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command that measures.

    columns     paths in the JSON of its last line, by the column of the record.
    smoke       flags of a short run with the demo model.
    serves      it sends requests to a server that the campaign starts.
    own_caches  environment variables that name an empty folder during a run.
    """

    command: str
    columns: dict[str, str]
    smoke: str = ""
    serves: bool = False
    own_caches: tuple[str, ...] = ()


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One program, run for a subject.

    program  its name.
    trace    flags of `python -m bench trace`, whose file {trace} in `flags` is.
    label    follows the name of the subject in the name of the row.
    seconds  of all runs on one H200, without the start of a shared server.
    values   columns that are known before the run.
    repeat   number of runs; the record has the medians.
    """

    program: str
    flags: str
    seconds: float
    trace: str = ""
    label: str = ""
    values: dict[str, float] = {}
    repeat: int = 1


class Subject(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that is measured.

    flags    of the engine.
    start_s  seconds until a server of it is ready.
    """

    name: str
    model: str
    points: tuple[str, ...]
    flags: str = ""
    start_s: float = 40.0


class CampaignPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of bench/campaigns.toml."""

    programs: dict[str, Program]
    points: dict[str, Point]
    campaigns: dict[str, list[Subject]]


class CampaignRow(NamedTuple):
    """One point of one subject. at: the name of the point."""

    subject: Subject
    at: str
    point: Point
    program: Program

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (self.subject.name, self.point.label)))


def read_plan() -> CampaignPlan:
    """Return the plan of all campaigns."""
    return msgspec.toml.decode(_PLAN.read_bytes(), type=CampaignPlan)


def rows_of(
    plan: CampaignPlan,
    campaign: str,
    only: Sequence[str] = (),
    named: Sequence[str] = (),
    at: Sequence[str] = (),
) -> list[CampaignRow]:
    """Return the rows of a campaign, all of them without `only` and `named`. Raises ConfigError.

    only: a name of a row has one of these texts, from the start of a word on.
    named: whole names of rows.
    at: the names of the points to which the rows are limited; (): all points.
    """
    points = {name for subject in plan.campaigns[campaign] for name in subject.points}
    if missing := [name for name in at if name not in points]:
        raise ConfigError(f"no point of {campaign} is named {missing}; points: {sorted(points)}")
    rows = [
        CampaignRow(subject, name, plan.points[name], plan.programs[plan.points[name].program])
        for subject in plan.campaigns[campaign]
        for name in subject.points
        if not at or name in at
    ]
    names = [row.name for row in rows]
    unknown = [text for text in only if not any(_has(name, text) for name in names)]
    unknown += [name for name in named if name not in names]
    if unknown:
        raise ConfigError(f"no row of {campaign} is named {unknown}; rows: {'; '.join(names)}")
    return [
        row
        for row in rows
        if not (only or named) or row.name in named or any(_has(row.name, text) for text in only)
    ]


def _has(name: str, text: str) -> bool:
    return f" {text}" in f" {name}"


def values_of(row: CampaignRow, found: object) -> dict[str, float]:
    """Return the columns of a row from the JSON of its program. Raises ConfigError."""
    return row.point.values | {
        column: _number(found, path, column) for column, path in row.program.columns.items()
    }


def _number(found: object, path: str, column: str) -> float:
    for part in path.split("/"):
        if isinstance(found, dict):
            found = found.get(part)
        elif isinstance(found, list) and found:
            found = found[int(part)]
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise ConfigError(f"the program's JSON has no number {path}, so there is no {column}")
    return found * (1e3 if column.endswith("_ms") else 1e2 if column.endswith("_percent") else 1)
