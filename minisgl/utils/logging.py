"""Logging of one process: one line per record, on stderr. The process's main sets it up.

A thread writes the lines, so that a stderr that nothing reads, or a full disk, neither blocks nor
ends the process. It loses lines instead, and reports their number.
"""

import json
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime

_FORMAT = "%(asctime)s %(levelname)-7s {role}[%(process)d] %(name)s: %(message)s"
_LAUNCHER_FORMAT = "%(asctime)s minisgl: %(message)s"
_MAX_LINES = 1000  # lines that wait for the thread
_FLUSH_S = 1.0  # time for the waiting lines to leave when the process ends
# The logger of the lines that belong on stdout in text logs.
_ANNOUNCE = "minisgl.announce"


class _OneLine(logging.Formatter):
    """Escapes line breaks in messages, which may hold client text, but not in tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


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


class _LineHandler(logging.handlers.QueueHandler):
    """Gives each line to a thread, which writes it to a file descriptor.

    A record is lost if _MAX_LINES lines wait, and a line is lost if the system refuses it. The next
    line that is written follows a line with the number of lost ones.
    """

    def __init__(self, fd: int, formatter: logging.Formatter) -> None:
        self._lines: queue.Queue[str] = queue.Queue(_MAX_LINES)
        super().__init__(self._lines)
        self.setFormatter(formatter)
        self._fd = fd
        self._lost = 0
        self._thread: threading.Thread | None = None

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, line: str) -> None:  # type: ignore[override]
        if self._thread is None:
            self._thread = threading.Thread(target=self._write, name="log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._lost += 1

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            lost = self._lost
            if lost:
                fields = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                text = f"log lines lost count={lost}"
                line = f"{self.format(logging.makeLogRecord({**fields, 'msg': text}))}\n{line}"
            data = f"{line}\n".encode("utf-8", "backslashreplace")
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
                self._lost -= lost
            except OSError:
                self._lost += 1
            self._lines.task_done()

    def flush(self) -> None:
        """Wait until all lines are written, at most _FLUSH_S."""
        until_s = time.monotonic() + _FLUSH_S
        while self._lines.unfinished_tasks and time.monotonic() < until_s:
            time.sleep(0.001)


def setup_logging(role: str, level: str, log_format: str = "text") -> None:
    """Send all log records of this process to stderr, marked with its role and pid.

    log_format: "text", or "json" for one object per line. Lines of the launcher in text logs carry
    the time only, because they are for the user in the terminal.
    """
    own_format = _LAUNCHER_FORMAT if role == "launcher" else _FORMAT.format(role=role)
    own_time = "%H:%M:%S" if role == "launcher" else None
    text_formatter = _OneLine(own_format, own_time)
    formatter = _Json(role) if log_format == "json" else text_formatter
    logging.root.handlers[:] = [_LineHandler(sys.stderr.fileno(), formatter)]
    package_logger = logging.getLogger("minisgl")
    package_logger.setLevel(level.upper())
    # At INFO, libraries log each connection, each lock file, and each URL with the keys in it.
    logging.root.setLevel(max(logging.WARNING, package_logger.level))
    if log_format == "text":
        announcer = logging.getLogger(_ANNOUNCE)
        announcer.handlers[:] = [_LineHandler(sys.stdout.fileno(), logging.Formatter())]
        announcer.setLevel(logging.INFO)
        announcer.propagate = False


def announce(line: str) -> None:
    """Write a line for the user: on stdout, or as a log record where logs are JSON."""
    logging.getLogger(_ANNOUNCE).info("%s", line)


def log_event(logger: logging.Logger, level: int, event: str, **fields: object) -> None:
    """Log a phrase with key=value fields. In JSON logs the fields are members."""
    shown = "".join(f" {name}=%({name})s" for name in fields)
    logger.log(level, f"{event}{shown}", fields)
