"""Logging of one process: stdlib, one line per record, on stderr. Called in process main only."""

import logging
import os
import sys

__all__ = ["setup_logging"]

_FORMAT = "%(asctime)s %(levelname)-7s %(role)s[%(process)d] %(name)s: %(message)s"


class _RoleFilter(logging.Filter):
    """Adds the role of this process to each record."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def filter(self, record: logging.LogRecord) -> bool:
        record.role = self._role
        return True


class _OneLine(logging.Formatter):
    """A message never spans lines, whatever a client put into it; tracebacks do."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


def setup_logging(role: str, level: str) -> None:
    """Send all log records of this process to stderr, marked with role and pid."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(_FORMAT))
    handler.addFilter(_RoleFilter(role))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries that speak at INFO about each connection, request or lock file.
    for noisy in ("uvicorn", "asyncio", "httpx", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    logging.getLogger(__name__).debug("logging set up pid=%d level=%s", os.getpid(), level)
