"""How long a test waits for something that must happen."""

import os

MAX_FACTOR = 10.0  # at most this many times the time on an idle machine


def patience(seconds: float = 90.0) -> float:
    """Return the seconds to wait now for something that takes at most `seconds` on free cores.

    The wait grows with the number of processes that share a core. It only ends a test that cannot
    succeed: no test passes or fails by the speed of the machine.
    """
    cores = len(os.sched_getaffinity(0))
    load, _, _ = os.getloadavg()
    return seconds * min(MAX_FACTOR, max(1.0, load / cores))
