"""The socket folder of a service, the cache folder of a user, usable cores, and process ages.

Linux only.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SOCKET_KEY = "key"  # name of the key file in the socket folder
_PREFIX = "minisgl-"  # of a socket folder
_MAX_SOCKET_DIR_CHARS = 80  # the path of a Unix socket has at most 107 characters
# Index of the start time in /proc/PID/stat, counted from the field after the process name. The name
# may contain spaces.
_START_FIELD = 19


@contextlib.contextmanager
def socket_folder() -> Iterator[str]:
    """Make a folder that only this user can enter (mode 0700), and remove it at the end.

    The file SOCKET_KEY in this folder holds a key. Every message of the service begins with it.
    A process that SIGKILL ends cannot remove its folder. The next call removes such folders: a
    running process holds a lock on its folder, and has it before the folder has a key.
    """
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _MAX_SOCKET_DIR_CHARS:
        base = Path("/tmp")
    for left in base.glob(f"{_PREFIX}*/{SOCKET_KEY}"):
        _remove_unlocked(left.parent)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_socket_key(folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove_unlocked(folder: Path) -> None:
    """Remove a socket folder of this user if no process holds its lock."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return  # its process has just removed it, or it belongs to another user
    try:
        status = os.fstat(lock)
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) == 0o700:
            with contextlib.suppress(BlockingIOError):  # its process runs
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def write_socket_key(folder: str | Path) -> None:
    """Write a new key for the queues in this folder."""
    (Path(folder) / SOCKET_KEY).write_bytes(secrets.token_bytes(16))


def process_age_s(pid: int) -> float:
    """Return the seconds since the process started, in steps of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def usable_cores() -> int:
    """Return the cores that this process may use, at least 1.

    The affinity mask and the CPU limit of a container count, and not the cores of the machine.
    """
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        cores = cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        pass  # not in a container with cgroup v2: only the affinity mask limits the cores
    return max(1, int(cores))
