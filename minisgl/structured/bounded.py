"""`BoundedProcess`: calls a function in a process of its own, with a limit on its CPU time."""

import contextlib
import os
import signal
from collections.abc import Callable
from typing import BinaryIO

_LENGTH_BYTES = 4


class BoundedProcess:
    """Calls `handle` in a forked process, which the kernel ends when a call exceeds its CPU time.

        process = BoundedProcess(handle, cpu_s=0.1)
        reply = process.call(b"request")  # None: the call exceeded the limit

    llguidance bounds most of its work by counters, but not all: a schema of 1 KB can take minutes
    and gigabytes while it compiles. A thread inside the library cannot be stopped, but a process
    can. The limit counts CPU time, so a busy machine does not change the result much.

    The constructor forks a parent that waits, and the parent forks the process that works. When the
    kernel ends the working process, the parent replies in its place and forks the next one, which
    has all data of `handle` already. Both processes end when the owner of this object ends or
    calls `close`.
    """

    def __init__(self, handle: Callable[[bytes], bytes], cpu_s: float) -> None:
        """Fork. handle: takes and returns up to 4 GiB. It must not raise: an exception is a bug."""
        request_fds, reply_fds = os.pipe(), os.pipe()
        if os.fork() == 0:
            # The other descriptors belong to the owner. An open copy would hide the owner's end.
            kept = {request_fds[0], reply_fds[1]}
            _close_others(kept)
            _supervise(
                handle, cpu_s, os.fdopen(request_fds[0], "rb"), os.fdopen(reply_fds[1], "wb")
            )
        os.close(request_fds[0])
        os.close(reply_fds[1])
        self._requests: BinaryIO = os.fdopen(request_fds[1], "wb")
        self._replies: BinaryIO = os.fdopen(reply_fds[0], "rb")

    def call(self, request: bytes) -> bytes | None:
        """Return the reply of `handle`, or None if the call exceeded its CPU time."""
        _write(self._requests, request)
        status = self._replies.read(1)
        if not status:
            raise EOFError("the process for grammars has ended")
        return _read(self._replies) if status == b"\x01" else None

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._requests.close()
        self._replies.close()


def _supervise(
    handle: Callable[[bytes], bytes], cpu_s: float, requests: BinaryIO, replies: BinaryIO
) -> None:
    """Fork a process that serves; if a signal ends it, reply in its place and fork again."""
    while True:
        pid = os.fork()
        if pid == 0:
            try:
                _serve(handle, cpu_s, requests, replies)
            finally:  # The fork must not return into the code of its owner.
                os._exit(1)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            os._exit(os.waitstatus_to_exitcode(status))
        replies.write(b"\x00")
        replies.flush()


def _serve(
    handle: Callable[[bytes], bytes], cpu_s: float, requests: BinaryIO, replies: BinaryIO
) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while request := _read(requests):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply = handle(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(b"\x01")
        _write(replies, reply)
    os._exit(0)


def _write(pipe: BinaryIO, data: bytes) -> None:
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> bytes:
    """Return the next data; b"" at the end of the pipe."""
    return pipe.read(int.from_bytes(pipe.read(_LENGTH_BYTES), "little"))


def _close_others(kept: set[int]) -> None:
    """Close all descriptors except these and the standard streams."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
