"""Child processes that never outlive their parent, and a parent that sees the end of each child.

Parent side: `Supervisor`. It has one thread and no asyncio: signals, exits and reports arrive
through one wake-up pipe. It reaps every child and every orphan, so it works as PID 1 without an
init.

Child side: the main function of a child first calls `bind_to_parent`, and reads its payload, the
first line of standard input. It calls `write_reason` before it ends with an error.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType

CONFIG_EXIT = 2  # the exit code after a ConfigError, as after a wrong command line
_PR_SET_PDEATHSIG = 1
_KILLED_EXIT_S = 1.0  # the longest time from the last closed connection of a process to its end
_MAX_REASON_BYTES = 1500  # less than PIPE_BUF (one atomic write) and Kubernetes' limit of 2,048
CHILD_ENV_DEFAULTS: Mapping[str, str] = {
    # Threads of libgomp otherwise spin at each barrier. On cores that other processes use too, a
    # step of the demo model then takes 60 ms instead of 4 ms.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def bind_to_parent() -> None:
    """Call `die_with` for the parent whose pid `spawn_child` has given as the last argument."""
    die_with(int(sys.argv[-1]))


def die_with(parent: int) -> None:
    """Let Linux kill this process when its parent ends, even if this process is stuck."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before prctl took effect
        os._exit(1)


def describe_exit(code: int) -> str:
    """Describe an exit code in words. A negative code is the number of a signal."""
    if code >= 0:
        return f"exited with code {code}"
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}"


def write_report(fd: int) -> None:
    """Send the parent an event without a value. fd: the report_fd of the parent's Supervisor."""
    os.write(fd, b"\0")  # 0 is the number of no signal


def write_reason(fd: int, role: str, reason: str) -> None:
    """Send the parent one line with the reason for the end of this process."""
    line = " ".join(reason.split()) or "no reason given"
    encoded = f"{role}\t{line}".encode("utf-8", "replace")[:_MAX_REASON_BYTES]
    with contextlib.suppress(OSError):  # the parent has ended, or its pipe is full
        os.write(fd, encoded + b"\n")


def read_reasons(fd: int) -> dict[str, str]:
    """Read the reasons that children have written to this non-blocking pipe, by role.

    The oldest reason comes first. Each call returns only new reasons.
    """
    lines: list[str] = []
    with contextlib.suppress(BlockingIOError):
        lines = os.read(fd, 65536).decode("utf-8", "replace").splitlines()
    return {role: reason for role, _, reason in (line.partition("\t") for line in lines)}


@dataclass(eq=False, slots=True)
class Child:
    """One spawned process."""

    role: str
    process: subprocess.Popen[bytes]

    @property
    def exit_code(self) -> int | None:
        """The exit code: None until the process has been reaped, negative if a signal ended it."""
        return self.process.returncode

    def explain(self, reasons: Mapping[str, str]) -> str:
        """Return the cause of the end: the reason that the process wrote, else its exit code."""
        assert self.exit_code is not None, f"{self.role} must have ended; this is a bug"
        reason = reasons.get(self.role)
        if reason is None:
            return f"{self.role} (pid {self.process.pid}) {describe_exit(self.exit_code)}"
        return reason if self.exit_code == CONFIG_EXIT else f"{self.role}: {reason}"


def await_killed(peers: Sequence[Child], wait: Callable[[float], object]) -> None:
    """Give a killed child time to end, after one of its peers has ended.

    Linux closes the connections of a killed process before the parent can reap it. On a machine
    with many busy processes, the peers may notice the closed connections, end and be reaped first.
    Returns when all peers have ended, when one has ended for a reason of its own (a signal or a
    ConfigError), and after _KILLED_EXIT_S: a peer may also wait forever for the one that has ended.

    peers: children that end when one of them ends. wait: reaps the peers that have ended; it may
    wait for one until the CLOCK_MONOTONIC time that it is given.
    """
    until_s = time.monotonic() + _KILLED_EXIT_S
    while time.monotonic() < until_s and any(peer.exit_code is None for peer in peers):
        codes = [peer.exit_code for peer in peers if peer.exit_code is not None]
        if any(code < 0 or code == CONFIG_EXIT for code in codes):
            return
        wait(until_s)


def first_failed(
    ended: Sequence[Child], children: Sequence[Child], reasons: Mapping[str, str]
) -> Child:
    """Return the child that failed first.

    A child that a signal killed failed first, because it gave the others no reason. Otherwise the
    child with the oldest reason did. The others fail because they have lost a peer, and the order
    in which their ends are seen says nothing.

    ended: of `children`, those that have been reaped; not empty. reasons: of `read_reasons`.
    """
    killed = [child for child in ended if (child.exit_code or 0) < 0]
    reported = [child for role in reasons for child in children if child.role == role]
    return [*killed, *reported, *ended][0]


def spawn_child(
    role: str,
    argv: Sequence[str],
    payload: bytes,
    pass_fds: Sequence[int] = (),
    env_defaults: Mapping[str, str] = MappingProxyType({}),
) -> Child:
    """Start `argv` with the pid of this process as its last argument, and send `payload`.

    The payload is the first line of the child's standard input. A line needs no end of file, which
    would not arrive while another process holds a copy of the pipe.
    The child has its own process group, so that Ctrl-C in a terminal reaches only the parent.
    Variables of the environment that are not set get the values of CHILD_ENV_DEFAULTS and of
    `env_defaults`.
    """
    process = subprocess.Popen(
        [*argv, str(os.getpid())],
        pass_fds=pass_fds,
        stdin=subprocess.PIPE,
        env={**CHILD_ENV_DEFAULTS, **env_defaults, **os.environ},
        process_group=0,
    )
    assert process.stdin is not None, "the child must have a pipe; this is a bug"
    # BrokenPipeError: the child has ended; `wait` reports its exit.
    with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
        pipe.write(payload + b"\n")
    return Child(role, process)


# The end of a child, a signal to this process, or None: a child has called `write_report`.
Event = Child | signal.Signals | None


class Supervisor:
    """Turns exits of children, and signals to this process, into events, until the process ends.

    report_fd  the end of the wake-up pipe for `write_report`. Python writes signals to it.

    I1  A child in `children` with exit_code None has not been reaped.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._wake_read, self.report_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup sets SIG_IGN
            numbers.add(signal.SIGHUP)
        for number in numbers:
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(self.report_fd, warn_on_full_buffer=False)

    def adopt(self, child: Child) -> Child:
        """Report the end of this child from now on."""
        self.children.append(child)
        return child

    def send_signal(self, child: Child, number: int) -> None:
        """Signal a child that has not been reaped. The pid of a reaped child may be reused (I1)."""
        if child.exit_code is None:
            os.kill(child.process.pid, number)

    def wait(self, until_s: float | None) -> list[Event]:
        """Wait for signals, for reports of children and for their ends.

        until_s: the CLOCK_MONOTONIC time at which the wait ends with an empty list. None: no limit.
        A SIGCHLD of an orphan, or of a child that is already reaped, does not end the wait.
        """
        events: list[Event] = [*self._reap()]
        while not events:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([self._wake_read], [], [], left_s)[0]:
                break
            numbers = os.read(self._wake_read, 4096)
            events += [signal.Signals(n) if n else None for n in numbers if n != signal.SIGCHLD]
            events += self._reap()
        return events

    def _reap(self) -> list[Child]:
        ended = []
        with contextlib.suppress(ChildProcessError):  # this process has no child at all
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                for child in self.children:  # none for an orphan, which PID 1 inherits
                    if child.process.pid == pid and child.exit_code is None:
                        child.process.returncode = os.waitstatus_to_exitcode(status)
                        ended.append(child)
        return ended

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and after `grace_s` SIGKILL to children that still run. Reaps all."""
        for child in self.children:
            self.send_signal(child, signal.SIGTERM)
        self.join(self.children, grace_s)
        self.kill()

    def join(self, children: Sequence[Child], timeout_s: float | None) -> None:
        """Wait until these children have ended. With a timeout, a signal also ends the wait."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while any(child.exit_code is None for child in children):
            events = self.wait(until_s)
            signalled = any(isinstance(event, signal.Signals) for event in events)
            if until_s is not None and (signalled or not events):
                return

    def kill(self) -> None:
        """Send SIGKILL to the children that still run, and reap them."""
        for child in self.children:
            self.send_signal(child, signal.SIGKILL)
        self.join(self.children, None)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Python writes a signal to the wake-up pipe only if the signal has a handler."""
