"""The free memory of the machine or of its container."""

from pathlib import Path


def cpu_free_bytes() -> int:
    """Return the memory that new processes could take, at most the limit of the container."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    sizes = dict(line.split(":") for line in lines)
    free = 1024 * int(sizes["MemAvailable"].split()[0])
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return free  # not in a container with cgroup v2
    return free if limit == "max" else min(free, int(limit))
