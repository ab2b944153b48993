"""What processes of this host know of each other, and where they meet. Linux only."""

import os
import tempfile
import time
from pathlib import Path

_MAX_SOCKET_DIR_CHARS = 80  # an ipc path holds 107
_START_FIELD = 19  # of /proc/PID/stat, counted after the name, which may hold spaces


def make_socket_dir() -> str:
    """A new directory that only this user can enter (mode 0700)."""
    base = tempfile.gettempdir()
    if len(base) > _MAX_SOCKET_DIR_CHARS:
        base = "/tmp"
    return tempfile.mkdtemp(prefix="minisgl-", dir=base)


def process_age_s(pid: int) -> float:
    """Seconds since the process was started, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
