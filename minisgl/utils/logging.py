"""Logging of one process: one line per record, on stderr. The process's main sets it up.

A thread writes the lines. A full disk, or a stderr that no process reads, therefore neither blocks
nor ends the process. The process loses lines instead, and reports their number.
"""

import json
import logging
import os
import queue
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime

_FORMAT = "%(asctime)s %(levelname)-7s {role}[%(process)d] %(name)s: %(message)s"
_MAX_LINES = 1000  # lines that wait for the thread
_FREQUENT = ("call refused", "accept failed")  # events that clients cause
_FLUSH_S = 1.0  # time for the waiting lines to leave when the process ends


class _OneLine(logging.Formatter):
    """Escapes line breaks in messages, because a message may hold client text.

    Tracebacks keep their line breaks. Values of fields with spaces, quotes or `=` are quoted, so
    that a client cannot forge a field.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = record.args
        if isinstance(fields, Mapping):
            record.args = {name: _quoted(value) for name, value in fields.items()}
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


def _quoted(value: object) -> str:
    """The value as text: in quotes, with escapes as in JSON, unless it is one plain word."""
    text = str(value)
    plain = text.isprintable() and text and not any(char in text for char in ' ="\\')
    return text if plain else json.dumps(text)


class _Json(logging.Formatter):
    """Writes one JSON object per record. Tracebacks and the fields of `log_event` are members."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        fields = record.args if isinstance(record.args, Mapping) else {}
        moment = datetime.fromtimestamp(record.created, UTC)
        entry: dict[str, object] = {
            **fields,
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "role": self._role,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _LineHandler(logging.Handler):
    """Gives each line to a thread, which writes it to stderr.

    A line is lost if _MAX_LINES lines wait, or if the system refuses it. Before the next line,
    the thread writes a line with the number of lost lines.
    """

    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._lines: queue.Queue[str] = queue.Queue(_MAX_LINES)
        self._dropped = 0
        self._passed: dict[object, tuple[float, int]] = {}
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def filter(self, record: logging.LogRecord) -> bool:
        """Pass one line per reason and second of some events. held_back counts the other lines."""
        fields = record.args
        if not isinstance(fields, Mapping) or not record.msg.startswith(_FREQUENT):
            return True
        passed_s, held_back = self._passed.get(fields["reason"], (0.0, 0))
        passes = record.created - passed_s >= 1
        entry = (record.created, 0) if passes else (passed_s, held_back + 1)
        self._passed[fields["reason"]] = entry
        if passes and held_back:
            record.msg += " held_back=%(held_back)s"
            record.args = {**fields, "held_back": held_back}
        return passes

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        refused = reported = 0
        while True:
            line, lost = self._lines.get(), self._dropped + refused
            if lost > reported:
                text = f"log lines lost count={lost - reported}"
                fields = {"name": __name__, "levelname": "WARNING", "msg": text}
                line = f"{self.format(logging.makeLogRecord(fields))}\n{line}"
            data = f"{line}\n".encode("utf-8", "backslashreplace")
            try:
                # This is not sys.stderr.write: its lock would keep the interpreter from ending.
                while data:
                    data = data[os.write(sys.stderr.fileno(), data) :]
                reported = lost
            except OSError:
                refused += 1
            self._lines.task_done()

    def flush(self) -> None:
        """Wait until all lines are written, at most _FLUSH_S."""
        written = self._lines.all_tasks_done
        with written:
            written.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)


def setup_logging(role: str, level: str, log_format: str = "text") -> None:
    """Send all log records of this process to stderr, marked with its role and pid.

    log_format: "text", or "json" for one object per line.
    """
    text_formatter = _OneLine(_FORMAT.format(role=role))
    handler = _LineHandler(_Json(role) if log_format == "json" else text_formatter)
    logging.root.handlers[:] = [handler]
    package_logger = logging.getLogger("minisgl")
    package_logger.setLevel(level.upper())
    # At INFO, libraries log each connection, each lock file, and each URL with the keys in it.
    logging.root.setLevel(max(logging.WARNING, package_logger.level))


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log a phrase with key=value fields. In JSON logs the fields are members.

    Text logs quote values that are not one plain word.
    """
    shown = "".join(f" {name}=%({name})s" for name in fields)
    logger.log(level, f"{event}{shown}", fields)
