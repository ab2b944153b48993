"""`BoundedProcess`: calls a function in a process of its own, with a limit on its CPU time."""

import contextlib
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

STACK_BYTES = 3 * 2**19


class BoundedProcess:
    """Calls `handle` in a forked process, which the kernel ends when a call exceeds its CPU time.

        process = BoundedProcess(handle, cpu_s=0.1)
        reply = process.call(b"request")  # None: the call exceeded the limit

    llguidance bounds most of its work by counters, but not all: a schema of 1 KB can take minutes
    and gigabytes while it compiles. A thread inside the library cannot be stopped, but a process
    can. The limit counts CPU time, so a busy machine does not change the result much.

    The kernel also ends a call whose stack exceeds STACK_BYTES. llguidance recurses once for each
    $ref or rule, and the threads that compile an accepted grammar have 2 MiB of stack on a machine
    with `ulimit -s unlimited`. A grammar that fits here therefore fits there.

    The constructor forks a parent that waits, and the parent forks the process that works. When the
    kernel ends the working process, the parent replies in its place and forks the next one, which
    has all data of `handle` already. Both processes end when the owner of this object ends or
    calls `close`.
    """

    def __init__(self, handle: Callable[[bytes], bytes], cpu_s: float) -> None:
        """Fork. handle: returns at least one byte. It must not raise: an exception is a bug."""
        self._pipe, pipe = Pipe()
        if os.fork() == 0:
            # Close the owner's descriptors: with open copies, this process would not see it end.
            last_fd = max(map(int, os.listdir("/proc/self/fd")))
            os.closerange(3, pipe.fileno())
            os.closerange(pipe.fileno() + 1, last_fd + 1)
            _supervise(handle, cpu_s, pipe)
        pipe.close()

    def call(self, request: bytes) -> bytes | None:
        """Return the reply of `handle`, or None if the call exceeded its CPU time or stack."""
        self._pipe.send_bytes(request)
        try:
            return self._pipe.recv_bytes() or None
        except EOFError:
            raise EOFError("the process for grammars has ended") from None

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._pipe.close()


def _supervise(handle: Callable[[bytes], bytes], cpu_s: float, pipe: Connection) -> None:
    """Fork a process that serves; if a signal ends it, reply in its place and fork again."""
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                _serve(handle, cpu_s, pipe)
            finally:  # The fork must not return into the code of its owner.
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            os._exit(os.waitstatus_to_exitcode(status))
        pipe.send_bytes(b"")


def _serve(handle: Callable[[bytes], bytes], cpu_s: float, pipe: Connection) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    least = STACK_BYTES if most == resource.RLIM_INFINITY else min(STACK_BYTES, most)
    resource.setrlimit(resource.RLIMIT_STACK, (least, most))
    with contextlib.suppress(EOFError):
        while True:
            request = pipe.recv_bytes()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)
            reply = handle(request)
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send_bytes(reply)
    os._exit(0)
