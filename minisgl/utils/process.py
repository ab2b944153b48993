"""The socket folder that the processes of one service share, and process ages. Linux only."""

import os
import secrets
import tempfile
import time
from pathlib import Path

SOCKET_KEY = "key"  # name of the file
_MAX_SOCKET_DIR_CHARS = 80  # the path of a Unix socket has at most 107 characters
_START_FIELD = 19  # in /proc/PID/stat after the process name, which may contain spaces


def make_socket_dir() -> str:
    """Make a folder that only this user can enter (mode 0700), and return its path.

    The file SOCKET_KEY in it holds the key with which the messages of this service begin.
    """
    base = tempfile.gettempdir()
    if len(base) > _MAX_SOCKET_DIR_CHARS:
        base = "/tmp"
    folder = tempfile.mkdtemp(prefix="minisgl-", dir=base)
    write_socket_key(folder)
    return folder


def write_socket_key(folder: str | Path) -> None:
    """Write a new key for the queues in this folder."""
    (Path(folder) / SOCKET_KEY).write_bytes(secrets.token_bytes(16))


def process_age_s(pid: int) -> float:
    """Return the seconds since the process started, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
