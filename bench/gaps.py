"""Prints the longest steps of streams, from a file of `minisgl bench online --json FILE --samples`.

The run has streams (--beside). A step gives a token to each stream, so the tokens of a step arrive
together. The output has the time of each long step, the time of the step after it, and its place
between the send of a prompt and the first token of this prompt.

A short step after a long one: the client or the API process was late. An ordinary step after it:
the step took this long. Long steps at one place of all prompts: the prompts cause them. Long steps
at other places: the machine does.

The p99 of the gaps is the time of one step, because all streams have this gap. The output tells
its place among the longest steps: in a run of fewer than 400 steps, four long ones set the p99.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from minisgl.benchmark.flag_types import positive_int
from minisgl.benchmark.text_table import TextTable
from minisgl.core import ConfigError

_TOGETHER_S = 2e-3  # the tokens of a step follow each other within this time
_COLUMNS = ("step", "next step", "after the send", "before the token")


class _Answer(msgspec.Struct):
    """An answer in the file. Times are seconds after the send of the first prompt."""

    sent_s: float
    outputs_s: list[float] = []


class _Run(msgspec.Struct):
    """A file of `minisgl bench online`. requests: the prompts. streams: those of --beside."""

    requests: list[_Answer]
    streams: list[_Answer]


class Step(NamedTuple):
    """A step of the streams.

    end_s  when its tokens arrived; the median of the streams.
    gap_s  time since the step before; the median of the streams.
    """

    end_s: float
    gap_s: float


def read_run(path: Path) -> _Run:
    """Return the samples of a run. Raises ConfigError for a file without them."""
    try:
        run = msgspec.json.decode(path.read_bytes(), type=_Run)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is no file of minisgl bench online: {error}") from None
    if not run.streams or not all(each.outputs_s for each in [*run.requests, *run.streams]):
        raise ConfigError(f"{path} needs the samples of streams: give --beside and --samples")
    return run


def steps_of(run: _Run) -> tuple[list[Step], np.ndarray[Any, np.dtype[np.float64]]]:
    """Return the steps that end while prompts are open, and the gaps in seconds of all streams."""
    begin_s = min(each.sent_s for each in run.requests)
    end_s = max(each.outputs_s[-1] for each in run.requests)
    times = [np.array(stream.outputs_s) for stream in run.streams]
    ends, gaps = (np.concatenate(p) for p in ([t[1:] for t in times], [np.diff(t) for t in times]))
    order = np.argsort(ends)
    order = order[(ends[order] > begin_s) & (ends[order] <= end_s)]
    ends, gaps = ends[order], gaps[order]
    cuts = np.flatnonzero(np.diff(ends) > _TOGETHER_S) + 1
    pairs = zip(np.split(ends, cuts), np.split(gaps, cuts), strict=True)
    return [Step(float(np.median(e)), float(np.median(g))) for e, g in pairs if len(g)], gaps


def longest(run: _Run, steps: Sequence[Step], count: int) -> list[dict[str, float]]:
    """Return a row of milliseconds for each of the longest steps, in order of time.

    The prompt of a row is the last one that was sent before the end of the step.
    """
    chosen = sorted(sorted(range(len(steps)), key=lambda n: -steps[n].gap_s)[:count])
    rows = []
    for number in chosen:
        step = steps[number]
        prompt = max(
            (each for each in run.requests if each.sent_s < step.end_s),
            key=lambda each: each.sent_s,
        )
        row = {
            "step": step.gap_s,
            "after the send": step.end_s - prompt.sent_s,
            "before the token": prompt.outputs_s[0] - step.end_s,
        }
        if number + 1 < len(steps):
            row["next step"] = steps[number + 1].gap_s
        rows.append({name: 1e3 * time for name, time in row.items()})
    return rows


def main(argv: Sequence[str]) -> int:
    """Print the longest steps, and one line of JSON."""
    parser = argparse.ArgumentParser(prog="python -m bench gaps", description=__doc__)
    parser.add_argument("file", type=Path, help="of minisgl bench online with --samples")
    parser.add_argument("--steps", type=positive_int, default=12, help="longest steps to show (12)")
    options = parser.parse_args(argv)
    run = read_run(options.file)
    steps, gaps = steps_of(run)
    if not steps:
        raise ConfigError(f"{options.file}: no stream has a token while a prompt is open")
    p50, p99 = (1e3 * float(np.percentile(gaps, percent)) for percent in (50, 99))
    place = int(0.01 * len(steps)) + 1
    table = TextTable({"ms": "<6"} | dict.fromkeys(_COLUMNS, ">17.2f"))
    rows = longest(run, steps, options.steps)
    print(table.head)
    for number, row in enumerate(rows, 1):
        print(table.row(str(number), *(row.get(name, "") for name in _COLUMNS)))
    print(
        f"{len(steps)} steps of {len(run.streams)} streams: p50 {p50:.2f} ms, p99 {p99:.2f} ms, "
        f"{p99 / p50:.2f} medians, the time of longest step {place}"
    )
    found = {"steps": len(steps), "p50_ms": p50, "p99_ms": p99, "p99_medians": p99 / p50}
    print(json.dumps(found | {"place_of_p99": place, "longest": rows}))
    return 0
