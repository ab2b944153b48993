"""A supervisor inside the process of the tests."""

import contextlib
import signal
from collections.abc import Iterator

from minisgl.utils.supervise import Supervisor


@contextlib.contextmanager
def supervising() -> Iterator[Supervisor]:
    """A supervisor. After the block its children have ended, and the signals are those before."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in numbers}
    supervisor = Supervisor()
    try:
        yield supervisor
    finally:
        supervisor.kill()
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
