"""What the kernel knows of a process. Linux only, as all of minisgl."""

import os
import time
from pathlib import Path

_START_FIELD = 19  # of /proc/PID/stat, counted after the name, which may hold spaces


def process_age_s(pid: int) -> float:
    """Seconds since the process was started, to a hundredth."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
