"""Runs a campaign: the rows of a table of docs/benchmarks.md, each by the command of its own.

bench/campaigns.toml lists the campaigns. Each row is saved in bench/results when it ends, so a
campaign that is cut off keeps its earlier rows. A row that does not fit in --budget is skipped.
"""

import argparse
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.campaign_plan import CampaignRow, Subject, read_plan, rows_of, values_of
from bench.clocks import Clocks
from bench.records import RESULTS, Figure, write_record
from bench.runner import last_json, output_of, record_of
from minisgl.benchmark.flag_types import positive_float, positive_int
from minisgl.benchmark.server_process import start_server
from minisgl.core import ConfigError
from minisgl.demo import model_path

_TRACE = "agents.jsonl"  # the file of a synthetic trace
_DEMO = "demo"  # the name of the embedded model in bench/campaigns.toml


class Campaign:
    """Runs the rows of one campaign and saves their records."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._until_s: float = time.monotonic() + options.budget

    def run(self, rows: Sequence[CampaignRow]) -> list[str]:
        """Run the rows, and return a line for each one without a result."""
        missing: list[str] = []
        for subject in dict.fromkeys(row.subject for row in rows):
            of_subject = [row for row in rows if row.subject == subject]
            # A server holds the memory of the GPU, so it ends before the programs with an engine.
            serving = [row for row in of_subject if row.program.serves]
            missing += self._run_served(subject, serving)
            for row in of_subject:
                if not row.program.serves:
                    missing += self._run_row(row)
        return missing

    def _run_served(self, subject: Subject, rows: Sequence[CampaignRow]) -> list[str]:
        """Run the rows against one server."""
        if not rows or self._options.url is not None:
            return [line for row in rows for line in self._run_row(row, self._options.url)]
        if not self._fits(subject.start_s + min(map(self._seconds, rows))):
            return [f"{row.name}: not in the budget" for row in rows]
        sys.stderr.write(f"starting a server of {subject.name}\n")
        try:
            with start_server(self._model(subject), shlex.split(subject.flags)) as server:
                return [line for row in rows for line in self._run_row(row, server.url)]
        except ConfigError as error:
            return [f"{subject.name}: {error}"]

    def _run_row(self, row: CampaignRow, url: str | None = None) -> list[str]:
        if not self._fits(self._seconds(row)):
            return [f"{row.name}: not in the budget"]
        try:
            self._save(row, self._values(row, url))
        except ConfigError as error:
            return [f"{row.name}: {error}"]
        return []

    def _fits(self, seconds: float) -> bool:
        return time.monotonic() + seconds <= self._until_s

    def _values(self, row: CampaignRow, url: str | None) -> dict[str, float]:
        runs = [self._run(row, url) for _ in range(self._repeat(row))]
        return {key: statistics.median(run[key] for run in runs) for key in runs[0]}

    def _run(self, row: CampaignRow, url: str | None) -> dict[str, float]:
        clocks = Clocks()
        with tempfile.TemporaryDirectory() as folder:
            caches = {name: str(Path(folder) / name) for name in row.program.own_caches}
            trace = Path(folder) / _TRACE
            if row.point.trace:
                trace.write_text(output_of(_module(_trace_command(row))), encoding="utf-8")
            command = self.command(row, url, trace)
            sys.stderr.write(f"{row.name}: {shlex.join(command)}\n")
            with clocks.sampled():
                output = output_of(_module(command), variables=caches)
        return values_of(row, last_json(output)) | clocks.values()

    def _repeat(self, row: CampaignRow) -> int:
        return self._options.repeat or row.point.repeat

    def _seconds(self, row: CampaignRow) -> float:
        return row.point.seconds * self._repeat(row) / row.point.repeat

    def shown(self, row: CampaignRow) -> str:
        """Return the command of a row as a line for a shell, with its own server and its trace.

        Rows of a campaign that differ only in their caches have different lines: bench/results
        keeps one record of each line.
        """
        caches = [f"{name}=$(mktemp -d)" for name in row.program.own_caches]
        command = " ".join([*caches, shlex.join(self.command(row))])
        if not row.point.trace:
            return command
        return f"{shlex.join(_trace_command(row))} > {_TRACE} && {command}"

    def command(
        self, row: CampaignRow, url: str | None = None, trace: Path = Path(_TRACE)
    ) -> list[str]:
        """Return the command of a row. url: of a running server; None: the command starts it."""
        words = shlex.split(row.program.command)
        flags = shlex.split(row.point.flags)
        if "{trace}" in flags:
            flags[flags.index("{trace}")] = str(trace)
        if self._options.smoke:
            flags += shlex.split(row.program.smoke)
        engine = shlex.split(row.subject.flags)
        if words[-1] == "online":
            target = ["--url", url] if url else ["--model", self._model(row.subject)]
            rest = ["--", *engine] if engine and not url else []
            return [*words, *target, *flags, *rest]
        return [*words, "--model", self._model(row.subject), *engine, *flags]

    def _model(self, subject: Subject) -> str:
        if self._options.model is not None:
            return str(self._options.model)
        return str(model_path()) if self._options.smoke or subject.model == _DEMO else subject.model

    def _save(self, row: CampaignRow, values: dict[str, float]) -> None:
        for column, value in values.items():
            print(f"{row.name:<72} {column:<24} {value:>12,.5g}", flush=True)
        if self._options.results is not None:
            model = self._model(row.subject)
            note = "" if model == row.subject.model else f"{model} in place of {row.subject.model}"
            if (runs := self._repeat(row)) > 1:
                note = "; ".join(filter(None, (note, f"medians of {runs} runs")))
            if self._options.smoke:
                note = "a smoke run of the demo model"
            figures = [Figure(row.name, dict(values), note)]
            record = record_of(self.shown(row), figures, self._options.commit)
            name, _, version = self._options.engine.partition(" ")
            if name != "minisgl":
                record = msgspec.structs.replace(record, engine=name, commit=version)
            write_record(self._options.name, record, self._options.results)


def _trace_command(row: CampaignRow) -> list[str]:
    return ["python", "-m", "bench", "trace", *shlex.split(row.point.trace)]


def _module(command: list[str]) -> list[str]:
    """Return a command without the words that `python -m` replaces."""
    return command[2:] if command[:2] == ["python", "-m"] else command


def main(argv: Sequence[str]) -> int:
    """Run the rows of a campaign. Returns 1 if one has no result."""
    plan = read_plan()
    parser = argparse.ArgumentParser(prog="python -m bench campaign", description=__doc__)
    parser.add_argument("name", choices=sorted(plan.campaigns), help="the campaign")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="run the rows whose names have this text at the start of a word; may be repeated",
    )
    parser.add_argument(
        "--row",
        action="append",
        default=[],
        metavar="NAME",
        help="run the row of this name; may be repeated, also beside --only",
    )
    parser.add_argument(
        "--point",
        action="append",
        default=[],
        metavar="NAME",
        help="run only rows of this point of bench/campaigns.toml; may be repeated",
    )
    parser.add_argument(
        "--repeat",
        type=positive_int,
        metavar="N",
        help="runs of each row, whose record has the medians (the number of its point)",
    )
    parser.add_argument("--list", action="store_true", help="show the rows and their commands")
    parser.add_argument(
        "--budget",
        type=positive_float,
        default=math.inf,
        metavar="SECONDS",
        help="skip rows whose expected time does not fit in the rest of this time (all fit)",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="run each row for moments with the demo model; nothing is saved without --results",
    )
    parser.add_argument("--model", help="measure this model folder in place of each row's model")
    parser.add_argument("--url", help="measure a running server, in place of starting one")
    parser.add_argument(
        "--engine",
        default="minisgl",
        metavar="'NAME VERSION'",
        help="with --url: the engine of that server, for the record (minisgl)",
    )
    parser.add_argument("--commit", default="", help="measured commit, where git does not tell it")
    parser.add_argument("--results", type=Path, help="folder of the records (bench/results)")
    options = parser.parse_args(argv)
    if options.results is None and not options.smoke:
        options.results = RESULTS
    rows = rows_of(plan, options.name, options.only, options.row, options.point)
    if options.engine != "minisgl" and options.url is None:
        parser.error("--engine names the engine of the server at --url; give --url")
    if options.url is not None and not all(row.program.serves for row in rows):
        parser.error("only rows over HTTP can run with --url; choose them with --only")
    campaign = Campaign(options)
    if options.list:
        for row in rows:
            print(f"{row.name} ({row.point.seconds:.0f} s)\n    {campaign.shown(row)}")
        return 0
    missing = campaign.run(rows)
    print(*(f"no result: {line}" for line in missing), sep="\n")
    return 1 if missing else 0
