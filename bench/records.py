"""The results of benchmarks: `bench/results/NAME.json` holds the records of one benchmark.

A record has the figures of one command on one machine. A file keeps the newest record of each
command, engine and machine, the oldest record first.
"""

from pathlib import Path

import msgspec

from minisgl.core import ConfigError

RESULTS = Path(__file__).with_name("results")


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One row of a table.

    name    of the measured object, such as a model or a kernel.
    values  by column. The name of a column ends in its unit, such as _s, _us or _per_s. None: there
            was no answer in time.
    note    a remark on the numbers.
    """

    name: str
    values: dict[str, float | None]
    note: str = ""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The figures of one command.

    date      of the measurement, YYYY-MM-DD.
    engine    minisgl, or the name of the engine that was measured in its place.
    commit    of the measured code; for another engine its commit or version; "": not recorded.
    machine   devices or processors.
    versions  by name of the software.
    source    the page and the line from which the figures were transcribed; "": the runner wrote
              the record.
    """

    date: str
    engine: str = "minisgl"
    commit: str
    machine: str
    versions: dict[str, str]
    command: str
    source: str = ""
    figures: list[Figure]

    @property
    def key(self) -> tuple[str, str, str]:
        """A file keeps one record of each key: the command, the engine and the machine."""
        return self.command, self.engine, self.machine


def read_records(name: str, folder: Path = RESULTS) -> list[Record]:
    """Return the records of a benchmark, [] without a file. Raises ConfigError for a wrong file."""
    path = folder / f"{name}.json"
    if not path.exists():
        return []
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Record])
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} does not hold records of a benchmark: {error}") from None


def write_record(name: str, record: Record, folder: Path = RESULTS) -> Path:
    """Add a record in place of an older one of the same command, engine and machine."""
    kept = [old for old in read_records(name, folder) if old.key != record.key]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    text = msgspec.json.format(msgspec.json.encode([*kept, record]), indent=1)
    path.write_bytes(text + b"\n")
    return path
