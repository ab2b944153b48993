"""`BoundedProcess`: calls a function in a process of its own, with limits on time and memory."""

import contextlib
import os
import resource
import select
import signal
import socket
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

from minisgl.utils.supervise import die_with

_STAYS, _ENDS = b"s", b"e"  # stands before a reply of the process that works
_REPLIED = b"\0"  # stands before a reply for the owner; the number of a signal stands alone


class Bounds(NamedTuple):
    """Limits on one call, and its priority.

    cpu_s         seconds of CPU time.
    memory_bytes  bytes of additional address space.
    stack_bytes   bytes of stack. None: the limit of the owner.
    niceness      added to the niceness of the owner.
    wall_s        seconds until a call that uses little CPU time is given up. None: no limit.
    """

    cpu_s: float
    memory_bytes: int
    stack_bytes: int | None = None
    niceness: int = 0
    wall_s: float | None = None


class BoundedProcess:
    """Calls `handle` in a forked process, which the kernel ends when a call exceeds its limits.

        process = BoundedProcess("the process for grammars", handle, Bounds(0.1, 2**29))
        reply = process.call(b"request")  # signal.SIGPROF: the call took more than 0.1 s

    A library can take minutes and gigabytes for 1 KB of input. A thread inside the library cannot
    be stopped, but a process can. The limit counts CPU time, so a busy machine does not change the
    result much.

    The constructor forks a parent, and the parent forks the process that works. When the kernel
    ends the working process, the parent replies in its place and forks the next one, which has all
    data of `handle` as it was when this object was made. Both processes end when the owner of this
    object ends, calls `close` or drops the object, even if `handle` is at work.

    lock: one thread holds it during a call. A thread that reads memory which `handle` writes holds
    it from before the call until it has read the memory.
    """

    def __init__(self, name: str, handle: Callable[[bytes], bytes], bounds: Bounds) -> None:
        """Fork. name: stands in errors. handle must not raise: an exception is a bug.

        Such an exception goes to stderr and ends both processes.
        """
        self._name, self._handle, self._bounds = name, handle, bounds
        self.lock = threading.RLock()
        self._pipe: Connection | None = None
        self._start()

    def call(self, request: bytes) -> bytes | signal.Signals:
        """Return the reply of `handle`, or the signal that ended the call.

        The signal is SIGPROF for the CPU time, SIGABRT for the memory and SIGSEGV for the stack.
        Raises EOFError if the processes have ended in another way, and TimeoutError after
        Bounds.wall_s, which kills them. The next call starts new ones.
        """
        with self.lock:
            pipe = self._pipe or self._start()
            try:
                pipe.send_bytes(request)
                if not pipe.poll(self._bounds.wall_s):
                    os.kill(self._pid, signal.SIGKILL)  # the process that works dies with it
                    raise TimeoutError(
                        f"{self._name} has not replied for {self._bounds.wall_s:g} s, although it "
                        "has CPU time left"
                    )
                reply = pipe.recv_bytes()
            except (EOFError, ConnectionError):
                self.close()
                raise EOFError(f"{self._name} has ended; the cause is on stderr") from None
            except BaseException:  # such as an interrupt: the pipe may hold a part of a message
                self.close()
                raise
        return reply[1:] if reply[:1] == _REPLIED else signal.Signals(reply[0])

    def close(self) -> None:
        """End both processes. A second call does nothing."""
        self._pipe = None
        self._end()

    def _start(self) -> Connection:
        ours, pipe = Pipe()
        pid = os.fork()
        if pid == 0:
            with _forked():
                # Close the owner's descriptors: with open copies, this process would not see its
                # end.
                last_fd = max(map(int, os.listdir("/proc/self/fd")))
                os.closerange(3, pipe.fileno())
                os.closerange(pipe.fileno() + 1, last_fd + 1)
                _supervise(self._handle, self._bounds, pipe)
        pipe.close()
        self._pid, self._pipe = pid, ours
        self._end = weakref.finalize(self, _close, ours, pid)
        return ours


def _close(pipe: Connection, pid: int) -> None:
    """End the processes at the other end of a pipe, and wait for their end."""
    # Another fork of the owner may hold a copy of this end, so closing it is not enough.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
    pipe.close()
    with contextlib.suppress(ChildProcessError):  # the owner has reaped all its children
        os.waitpid(pid, 0)


class _Worker:
    """The process that works, as its parent sees it."""

    def __init__(self, handle: Callable[[bytes], bytes], bounds: Bounds, owner: Connection) -> None:
        self._owner = owner
        self._pipe, pipe = Pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            with _forked():
                die_with(parent)
                self._pipe.close()
                owner.close()
                _serve(handle, bounds, pipe)
        pipe.close()

    def call(self, request: bytes) -> bytes:
        """Return the reply for the owner. The end of the owner ends the process."""
        with contextlib.suppress(EOFError, OSError):  # the process has ended
            self._pipe.send_bytes(request)
            self._wait()
            reply = self._pipe.recv_bytes()
            if reply[:1] == _ENDS:
                self.end()
            return _REPLIED + reply[1:]
        return bytes([self.end()])

    def _wait(self) -> None:
        """Wait for the reply. If the owner ends or closes, kill the process.

        The owner sends nothing during a call, so its pipe becomes readable by its end only.
        """
        poll = select.poll()
        for pipe in (self._pipe, self._owner):
            poll.register(pipe.fileno(), select.POLLIN)
        if self._pipe.fileno() not in dict(poll.poll()):
            os.kill(self._pid, signal.SIGKILL)

    @property
    def ended(self) -> bool:
        """True if the process has ended. An idle process that lives sends nothing."""
        return self._pipe.closed or self._pipe.poll()

    def end(self) -> int:
        """End the process, wait for its end, and return the number of the signal that ended it.

        A failure of the process ends this process as well.
        """
        if self._pipe.closed:
            return 0
        self._pipe.close()
        _, status = os.waitpid(self._pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code > 0:
            os._exit(code)
        return -code


@contextlib.contextmanager
def _forked() -> Iterator[None]:
    """End this process after the block: a fork must not return into the code of its owner."""
    try:
        # Ctrl-C in a terminal reaches all processes. The owner ends its processes.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
            owner.send_bytes(worker.call(request))
    worker.end()
    os._exit(0)


def _serve(handle: Callable[[bytes], bytes], bounds: Bounds, pipe: Connection) -> NoReturn:
    """Serve until the parent ends, or until past calls hold half of the memory of one call."""
    os.nice(bounds.niceness)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    stderr = os.dup(2)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 2)  # the library reports there that memory is not available
    _limit(resource.RLIMIT_CORE, 0)
    if bounds.stack_bytes is not None:
        _limit(resource.RLIMIT_STACK, bounds.stack_bytes)
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
