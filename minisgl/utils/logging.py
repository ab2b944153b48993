"""Logging of one process: one line per record, on stderr. Its main function sets the logging up."""

import copy
import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime

_FORMAT = "%(asctime)s %(levelname)-7s {role}[%(process)d] %(name)s: %(message)s"


class _OneLine(logging.Formatter):
    """Escapes line breaks in messages, because a message may hold client text.

    Tracebacks keep their line breaks. Values of fields with spaces, quotes or `=` are quoted, so
    that a client cannot forge a field.
    """

    def format(self, record: logging.LogRecord) -> str:
        fields = record.args
        if isinstance(fields, Mapping):
            record = copy.copy(record)  # Other handlers get the plain values.
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


def setup_logging(role: str, level: str, log_format: str = "text") -> None:
    """Send all log records of this process to stderr, marked with its role and pid.

    log_format: "text", or "json" for one object per line.
    """
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = _OneLine(_FORMAT.format(role=role))
    handler.setFormatter(_Json(role) if log_format == "json" else text_formatter)
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
