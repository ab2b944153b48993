"""Adds results of other machines or of parallel campaigns to bench/results, and prints them.

`python -m bench campaign NAME --results FOLDER` writes such folders. Campaigns that run at the same
time need a folder each, because two writers of one file would lose records. The output is a
Markdown table: the rows of docs/benchmarks.md with the commands that repeat them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.records import RESULTS, Record, read_records, write_record
from minisgl.core import ConfigError

_HEAD = ("benchmark", "row", "date", "code", "machine", "result", "command")


def collect(folders: Sequence[Path], results: Path) -> Iterator[tuple[str, Record]]:
    """Add the records of the folders to `results`, and yield each with the name of its benchmark.

    A record replaces one of the same command, engine and machine that has the same date or an
    earlier one. A record older than the one in `results` changes nothing; the newer one is yielded.
    Raises ConfigError, before any file changes, when a folder has no results or a file does not
    hold records.
    """
    found: list[tuple[str, Record]] = []
    for folder in folders:
        files = sorted(folder.glob("*.json"))
        if not files:
            raise ConfigError(f"{folder} has no results of benchmarks, which are files NAME.json")
        for file in files:
            found += [(file.stem, record) for record in read_records(file.stem, folder)]
    for name, record in found:
        kept = next((old for old in read_records(name, results) if old.key == record.key), record)
        if kept.date <= record.date:
            kept = record
            write_record(name, record, results)
        else:
            sys.stderr.write(f"{name}: kept {kept.date}, not {record.date}: {record.command}\n")
        yield name, kept


def lines_of(name: str, record: Record) -> Iterator[str]:
    """Yield the line of each figure in the Markdown table. name: of the benchmark."""
    for figure in record.figures:
        values = "; ".join(
            f"{column} {'-' if value is None else f'{value:.5g}'}"
            for column, value in figure.values.items()
        )
        result = f"{values} ({figure.note})" if figure.note else values
        cells = name, figure.name, record.date, record.commit, record.machine, result
        yield _line((*cells, f"`{record.command}`"))


def _line(cells: Sequence[str]) -> str:
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def main(argv: Sequence[str]) -> int:
    """Add the records, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench collect", description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="with NAME.json")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder that gets the records (bench/results)"
    )
    options = parser.parse_args(argv)
    print(_line(_HEAD), _line(["---"] * len(_HEAD)), sep="\n")
    for name, record in collect(options.folders, options.results):
        print(*lines_of(name, record), sep="\n")
    return 0
