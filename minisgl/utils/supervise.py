"""Child processes that never outlive their parent, and a parent that sees each of them end.

Parent side: `Supervisor`, one thread, no asyncio: signals and exits arrive through one wake-up
pipe. It reaps every child, its own or adopted, so it works as PID 1 without an init.
Child side: `read_payload` and `bind_to_parent`, called first thing in the child's main.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Self

CONFIG_EXIT = 2  # a ConfigError has been reported; the same code as a wrong command line
_PR_SET_PDEATHSIG = 1


def read_payload(fd: int) -> bytes:
    """Read the parent's one line; the pipe stays open as the death pipe."""
    with open(fd, "rb", closefd=False) as pipe:
        payload = pipe.readline()
    if not payload.endswith(b"\n"):
        os._exit(1)  # the parent died while starting us: nobody is left to tell
    return payload


def bind_to_parent(parent_pid: int, death_fd: int) -> None:
    """End this process when `parent_pid` ends: by signal, and by EOF on its pipe.

    The signal works even while this process is stuck; the pipe also where prctl is refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before prctl took hold
        os._exit(1)

    def wait_for_eof() -> None:
        while os.read(death_fd, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_eof, name="death-pipe", daemon=True).start()


def describe_exit(code: int) -> str:
    """Say in words how a process ended; a negative code is a signal."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def read_reasons(fd: int) -> dict[str, str]:
    """Why children are about to end, as they wrote it to this non-blocking pipe: role to reason.

    In the order in which they wrote, each told once.
    """
    lines: list[str] = []
    with contextlib.suppress(BlockingIOError):
        lines = os.read(fd, 65536).decode("utf-8", "replace").splitlines()
    return {role: reason for role, _, reason in (line.partition("\t") for line in lines)}


@dataclass(eq=False, slots=True)
class Child:
    """One spawned process.

    life_fd: our end of the pipe that its life hangs on, -1 where it has none.
    """

    role: str
    process: subprocess.Popen[bytes]
    life_fd: int = -1

    @property
    def exit_code(self) -> int | None:
        """None until it has been reaped; negative: ended by that signal."""
        return self.process.returncode

    def explain(self, reasons: Mapping[str, str]) -> str:
        """Why it has ended: what it wrote itself (read_reasons), or else how."""
        assert self.exit_code is not None, f"{self.role} still runs; this is a bug"
        reason = reasons.get(self.role)
        if reason is None:
            return f"{self.role} (pid {self.process.pid}) {describe_exit(self.exit_code)}"
        return reason if self.exit_code == CONFIG_EXIT else f"{self.role}: {reason}"


def spawn_child(
    role: str, argv: Sequence[str], payload: bytes, pass_fds: Sequence[int] = ()
) -> Child:
    """Start `argv` + [fd]; the child reads `payload`, a line, from it and then waits for its EOF.

    The child gets its own process group, so that a terminal's Ctrl-C reaches the parent only.
    """
    read_end, write_end = os.pipe2(os.O_CLOEXEC)
    try:
        process = subprocess.Popen(
            [*argv, str(read_end)],
            pass_fds=[*pass_fds, read_end],
            stdin=subprocess.DEVNULL,
            # libgomp's threads otherwise spin at each barrier: where others want the cores too, a
            # step of the demo model takes 60 ms in place of 4.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
            process_group=0,
        )
    finally:
        os.close(read_end)
    with (
        contextlib.suppress(BrokenPipeError),  # it died at once; its exit will be seen
        open(write_end, "wb", closefd=False) as pipe,
    ):
        pipe.write(payload + b"\n")
    return Child(role, process, write_end)


class Supervisor:
    """Turns the exits of children, and our own signals, into events.

    I1  a child in `children` with exit_code None has not been reaped.
    I2  every child of `spawn_child` holds the read end of a pipe whose only write end is ours.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup leaves it
            numbers.add(signal.SIGHUP)
        self._previous = {number: signal.signal(number, _ignore) for number in numbers}
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill(self.children)
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def adopt(self, child: Child) -> Child:
        """Watch a child of ours from now on."""
        self.children.append(child)
        return child

    def running(self) -> list[Child]:
        return [child for child in self.children if child.exit_code is None]

    def send_signal(self, child: Child, number: int) -> None:
        """Send a signal to a child that has not been reaped; its pid cannot be another's (I1)."""
        if child.exit_code is None:
            os.kill(child.process.pid, number)

    def wait(self, until_s: float | None) -> list[signal.Signals | Child]:
        """The next signals, and children that have ended; empty once it is `until_s`.

        Not before: a SIGCHLD may be of an orphan, or of a child that has been reaped already.
        """
        events: list[signal.Signals | Child] = [*self._reap()]
        while not events:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([self._wake_read], [], [], left_s)[0]:
                break
            for number in os.read(self._wake_read, 4096):
                if number != signal.SIGCHLD:
                    events.append(signal.Signals(number))
            events += self._reap()
        return events

    def _reap(self) -> list[Child]:
        ended = []
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            child = next((c for c in self.running() if c.process.pid == pid), None)
            if child is None:
                continue  # an orphan that we inherited as PID 1
            child.process.returncode = os.waitstatus_to_exitcode(status)
            if child.life_fd >= 0:
                os.close(child.life_fd)
            ended.append(child)
        return ended

    def stop(self, children: Sequence[Child], grace_s: float) -> None:
        """TERM, then KILL what is left after `grace_s`; returns when all of them are reaped."""
        for child in children:
            self.send_signal(child, signal.SIGTERM)
        self.join(children, grace_s)
        self.kill(children)

    def join(self, children: Sequence[Child], timeout_s: float | None) -> None:
        """Wait until these have ended, or, with a timeout, until it passes or a signal comes."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while any(child.exit_code is None for child in children):
            events = self.wait(until_s)
            signalled = any(isinstance(event, signal.Signals) for event in events)
            if until_s is not None and (signalled or not events):
                return

    def kill(self, children: Sequence[Child]) -> None:
        """KILL and reap what of these still runs."""
        for child in children:
            self.send_signal(child, signal.SIGKILL)
        self.join(children, None)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wake-up pipe carries the signal; the handler only has to exist."""
