"""The socket folder of a service, the cache folder of a user, and process ages. Linux only."""

import os
import secrets
import tempfile
import time
from pathlib import Path

SOCKET_KEY = "key"  # name of the key file in the socket folder
_MAX_SOCKET_DIR_CHARS = 80  # the path of a Unix socket has at most 107 characters
# Index of the start time in /proc/PID/stat, counted from the field after the process name. The name
# may contain spaces.
_START_FIELD = 19


def make_socket_dir() -> str:
    """Make a folder that only this user can enter (mode 0700), and return its path.

    The file SOCKET_KEY in this folder holds a key. Every message of the service begins with it.
    """
    base = tempfile.gettempdir()
    if len(base) > _MAX_SOCKET_DIR_CHARS:
        base = "/tmp"
    folder = tempfile.mkdtemp(prefix="minisgl-", dir=base)
    write_socket_key(folder)
    return folder


def cache_folder(name: str) -> Path | None:
    """Return minisgl's folder `name` in the user's cache folder; None without an absolute path.

    The user's cache folder is $XDG_CACHE_HOME or ~/.cache. The returned folder may not exist.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "minisgl" / name if os.path.isabs(base) else None


def write_socket_key(folder: str | Path) -> None:
    """Write a new key for the queues in this folder."""
    (Path(folder) / SOCKET_KEY).write_bytes(secrets.token_bytes(16))


def process_age_s(pid: int) -> float:
    """Return the seconds since the process started, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
