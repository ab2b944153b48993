"""The socket folder that the processes of one service share, and process ages. Linux only."""

import os
import tempfile
import time
from pathlib import Path

_MAX_SOCKET_DIR_CHARS = 80  # the path of a Unix socket has at most 107 characters
_START_FIELD = 19  # in /proc/PID/stat after the process name, which may contain spaces


def make_socket_dir() -> str:
    """Make a folder that only this user can enter (mode 0700), and return its path."""
    base = tempfile.gettempdir()
    if len(base) > _MAX_SOCKET_DIR_CHARS:
        base = "/tmp"
    return tempfile.mkdtemp(prefix="minisgl-", dir=base)


def process_age_s(pid: int) -> float:
    """Return the seconds since the process started, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
