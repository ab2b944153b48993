"""`BoundedProcess`: calls a function in a process of its own, with limits on time and memory."""

import contextlib
import os
import resource
import signal
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from struct import Struct
from typing import NamedTuple, NoReturn

STACK_BYTES = 3 * 2**19
LOW_PRIORITY = 10  # niceness of work that only its own request waits for
_NUMBER = Struct("<Q")  # stands before each request and each reply
_STAYS, _ENDS = b"s", b"e"  # stands before a reply of the process that works


class Bounds(NamedTuple):
    """Limits on one call: seconds of CPU time, and bytes of additional address space."""

    cpu_s: float
    memory_bytes: int


class BoundedProcess:
    """Calls `handle` in a forked process, which the kernel ends when a call exceeds its limits.

        process = BoundedProcess(handle, Bounds(cpu_s=0.1, memory_bytes=2**29))
        reply = process.call(b"request")  # None: the call exceeded a limit

    llguidance bounds most of its work by counters, but not all: a schema of 1 KB can take minutes
    and gigabytes while it compiles. A thread inside the library cannot be stopped, but a process
    can. The limit counts CPU time, so a busy machine does not change the result much.

    The kernel also ends a call whose stack exceeds STACK_BYTES. llguidance recurses once for each
    $ref or rule. The threads that compile an accepted grammar have more stack than this limit. A
    grammar that fits here therefore fits there.

    The constructor forks a parent, and the parent forks the process that works. When the kernel
    ends the working process, the parent replies in its place and forks the next one, which has all
    data of `handle` already. Requests and replies have numbers, and a reply with another number is
    dropped. Both processes end when the owner of this object ends or calls `close`.
    """

    def __init__(self, handle: Callable[[bytes], bytes], bounds: Bounds) -> None:
        """Fork. handle: returns at least one byte. It must not raise: an exception is a bug.

        Such an exception goes to stderr and ends both processes. Further calls raise EOFError.
        """
        self._number = 0
        self._pipe, pipe = Pipe()
        if os.fork() == 0:
            with _forked():
                # Close the owner's descriptors: with open copies, this process would not see its
                # end.
                last_fd = max(map(int, os.listdir("/proc/self/fd")))
                os.closerange(3, pipe.fileno())
                os.closerange(pipe.fileno() + 1, last_fd + 1)
                _supervise(handle, bounds, pipe)
        pipe.close()

    def call(self, request: bytes) -> bytes | None:
        """Return the reply of `handle`, or None if the call exceeded a limit.

        Raises EOFError if the process has ended.
        """
        self._number += 1
        number = _NUMBER.pack(self._number)
        try:
            self._pipe.send_bytes(number + request)
            return self._receive(number)
        except (EOFError, ConnectionError):
            message = "the process for grammars has ended; the cause is on stderr"
            raise EOFError(message) from None

    def _receive(self, number: bytes) -> bytes | None:
        while True:
            reply = self._pipe.recv_bytes()
            if reply.startswith(number):  # False: an exception has ended the call of this reply
                return reply[_NUMBER.size :] or None

    def close(self) -> None:
        """End the process. A second call does nothing."""
        self._pipe.close()


class _Worker:
    """The process that works, as its parent sees it."""

    def __init__(self, handle: Callable[[bytes], bytes], bounds: Bounds, owner: Connection) -> None:
        self._pipe, pipe = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            with _forked():
                self._pipe.close()
                owner.close()
                _serve(handle, bounds, pipe)
        pipe.close()

    def call(self, request: bytes) -> bytes:
        """Return the reply; b"" if a signal has ended the process."""
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            self._pipe.send_bytes(request)
            reply = self._pipe.recv_bytes()
            if reply[:1] == _ENDS:
                self.end()
            return reply[1:]
        self.end()
        return b""

    @property
    def ended(self) -> bool:
        """True if the process has ended. An idle process that lives sends nothing."""
        return self._pipe.closed or self._pipe.poll()

    def end(self) -> None:
        """End the process and wait for its end. A failure of it ends this process as well."""
        if not self._pipe.closed:
            self._pipe.close()
            _, status = os.waitpid(self._pid, 0)
            if code := max(os.waitstatus_to_exitcode(status), 0):  # negative: a signal ended it
                os._exit(code)


@contextlib.contextmanager
def _forked() -> Iterator[None]:
    """End this process after the block: a fork must not return into the code of its owner."""
    try:
        yield
    # The exit code tells the parent of the failure.
    except BaseException:  # noqa: BLE001
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(1)


def _supervise(handle: Callable[[bytes], bytes], bounds: Bounds, owner: Connection) -> NoReturn:
    """Pass each request of the owner to a process that works, until the owner has ended."""
    worker = _Worker(handle, bounds, owner)
    with contextlib.suppress(EOFError, ConnectionError):  # the owner has ended
        while True:
            request = owner.recv_bytes()
            if worker.ended:
                worker.end()
                worker = _Worker(handle, bounds, owner)
            reply = worker.call(request[_NUMBER.size :])
            owner.send_bytes(request[: _NUMBER.size] + reply)
    worker.end()
    os._exit(0)


def _serve(handle: Callable[[bytes], bytes], bounds: Bounds, pipe: Connection) -> NoReturn:
    """Serve until the parent ends, or until past calls hold half of the memory of one call."""
    os.setpriority(os.PRIO_PROCESS, 0, LOW_PRIORITY)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)  # the library reports there that memory is not available
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_STACK, STACK_BYTES)
    most = _address_space() + bounds.memory_bytes // 2
    with contextlib.suppress(EOFError):
        state = _STAYS
        while state == _STAYS:
            request = pipe.recv_bytes()
            _limit(resource.RLIMIT_AS, _address_space() + bounds.memory_bytes)
            signal.setitimer(signal.ITIMER_PROF, bounds.cpu_s)
            try:
                reply = handle(request)
            except MemoryError:
                os.abort()
            except BaseException:
                os.dup2(stderr, 2)
                raise
            signal.setitimer(signal.ITIMER_PROF, 0)
            if _address_space() > most:
                state = _ENDS
            pipe.send_bytes(state + reply)
    os._exit(0)


def _limit(kind: int, value: int) -> None:
    """Set the soft limit of this process. It is at most the hard limit."""
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (value if most == resource.RLIM_INFINITY else min(value, most), most))


def _address_space() -> int:
    """The size of the address space of this process in bytes."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
