"""Repeats a benchmark, in turns with another checkout, and saves the medians as a record.

Each run is a process of its own. It runs the code of its checkout, and its last line of output is
JSON. The runner reads no other part of the output, so it works with each benchmark.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bench.records import Figure, Record, write_record
from minisgl.core import ConfigError

ROOT = Path(__file__).resolve().parents[1]
_SOFTWARE = ("torch", "triton", "flashinfer-python", "numpy", "uvicorn")
Key = tuple[str, str]  # name and column of a value


class Turns(NamedTuple):
    """The samples of each value, in order of time: of this checkout, and of the other one."""

    ours: dict[Key, list[float]]
    theirs: dict[Key, list[float]]


def figures_of(title: str, found: object) -> Iterator[Figure]:
    """Yield the numbers in the JSON of a benchmark.

    The numbers of an object or of a list are a figure. Its name is the object's member `name`, the
    first text of the list, or `title`. Columns are the keys, or the positions in the list.
    """
    members: dict[str, object] = {}
    if isinstance(found, dict):
        title, members = str(found.get("name", title)), found
    elif isinstance(found, list):
        title = found[0] if found and isinstance(found[0], str) else title
        members = {str(index): member for index, member in enumerate(found)}
    numbers: dict[str, float | None] = {
        key: float(member)
        for key, member in members.items()
        if isinstance(member, int | float) and not isinstance(member, bool)
    }
    if numbers:
        yield Figure(title, numbers)
    for key, member in members.items():
        yield from figures_of(f"{title}, {key}", member)


def run_in_turns(arguments: Sequence[str], repeat: int, other: Path | None) -> Turns:
    """Run the benchmark `repeat` times in this checkout, and after each run once in the other.

    arguments: name and flags. Raises ConfigError when a run fails, or prints no line of JSON.
    """
    turns = Turns({}, {})
    for turn in range(1, repeat + 1):
        for checkout, samples in ((ROOT, turns.ours), (other, turns.theirs)):
            if checkout is not None:
                sys.stderr.write(f"run {turn} of {repeat} in {checkout}\n")
                output = output_of(["bench", *arguments], checkout)
                for figure in figures_of(arguments[0], last_json(output)):
                    for column, value in figure.values.items():
                        if value is not None:
                            samples.setdefault((figure.name, column), []).append(value)
    return turns


def output_of(
    module: Sequence[str], checkout: Path = ROOT, variables: Mapping[str, str] | None = None
) -> str:
    """Run `python -m MODULE` in a checkout, and return its output. Raises ConfigError.

    module: its name and arguments. variables: of the environment, beside those of this process.
    """
    paths = [str(checkout.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-m", *module],
        cwd=checkout,
        env=environ | dict(variables or {}),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise ConfigError(f"the program in {checkout} ended with the exit code {done.returncode}")
    return done.stdout


def last_json(output: str) -> object:
    """Return the value of the last line of a benchmark's output. Raises ConfigError."""
    try:
        return json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        raise ConfigError("the last line of the benchmark's output is not JSON") from None


def table(turns: Turns) -> Iterator[str]:
    """Yield a line for each value: medians, smallest and largest values, and the difference."""
    for key, ours in turns.ours.items():
        line = f"{key[0][:48]:<48} {key[1]:<16} {_spread(ours)}"
        if theirs := turns.theirs.get(key):
            before = statistics.median(theirs)
            change = f"{statistics.median(ours) / before - 1:+.1%}" if before else ""
            line += f"  {_spread(theirs)} {change:>8}"
        yield line


def _spread(samples: Sequence[float]) -> str:
    median = f"{statistics.median(samples):,.6g}"
    return f"{median:>12} {f'({min(samples):,.6g} to {max(samples):,.6g})':<28}"


def save(arguments: Sequence[str], samples: dict[Key, list[float]]) -> Path:
    """Write the medians to bench/results, and return the file."""
    values: dict[str, dict[str, float | None]] = {}
    for (name, column), numbers in samples.items():
        values.setdefault(name, {})[column] = statistics.median(numbers)
    figures = [Figure(name, columns) for name, columns in values.items()]
    record = record_of(" ".join(["python -m bench", *arguments]), figures)
    return write_record(arguments[0], record)


def record_of(command: str, figures: list[Figure], commit: str = "") -> Record:
    """Return a record of today, this machine and the installed software.

    commit: of the measured code; "": that of this checkout.
    """
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    if not commit:
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    found = importlib.metadata.distributions()
    installed = {each.metadata["Name"]: each.version for each in found}
    return Record(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        commit=commit,
        machine=_machine(),
        versions={"python": platform.python_version()}
        | {name: installed[name] for name in _SOFTWARE if name in installed},
        command=command,
        figures=figures,
    )


def _machine() -> str:
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return f"{os.cpu_count()} cores ({platform.machine()})"
