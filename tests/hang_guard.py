"""Ends a test that hangs, and measures the CPU time of each test.

A hung test and its processes use no CPU time. A slow test on a busy machine uses some. The guard
therefore measures CPU time instead of wall time.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import pytest

_SAMPLE_S = 1.0  # time between two samples; a process may end between two samples
_SHORT_S = 0.05  # a test of less wall time counts no CPU time of other processes
_ANSWER_S = 60.0  # time for the main thread to raise the failure
# The code under test uses SIGALRM.
_SIGNAL = signal.SIGRTMAX
_CPU_S = "cpu_s"  # name of the property of a report
# The CPU time and the time on CLOCK_MONOTONIC at the start of the test.
_BEGAN = pytest.StashKey[tuple[float, float]]()
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class HangLimits(NamedTuple):
    """The limits of one test.

    idle_s   a test hangs if its processes use less than `cpu_s` seconds of CPU time in this time.
    total_s  wall time after which a test ends in any case.
    """

    idle_s: float = 300.0
    cpu_s: float = 1.0
    total_s: float = 1800.0


def tree_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process, its descendants, and those that it has reaped."""
    ticks, pids = 0, [pid]
    while pids:
        folder = Path(f"/proc/{pids.pop()}")
        try:
            fields = (folder / "stat").read_text().rpartition(") ")[2].split()
            ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
            for task in os.listdir(folder / "task"):
                pids += map(int, (folder / "task" / task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue  # the process or the thread has ended
    return ticks * _TICK_S


class CpuMeter:
    """Counts the CPU seconds of this process and of its descendants. It has a lock.

    If a process ends and init reaps it, its CPU time leaves the sum of the tree. The meter keeps
    the seconds that it has counted, so it must be read about once a second.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._total_s, self._last_s = 0.0, tree_cpu_s(os.getpid())
        self._own_s = time.process_time()

    def read(self) -> float:
        with self._lock:
            now_s = tree_cpu_s(os.getpid())
            self._total_s += max(0.0, now_s - self._last_s)
            self._last_s, self._own_s = now_s, time.process_time()
            return self._total_s

    def read_own(self) -> float:
        """Return the seconds of the last `read`, and those of this process since then.

        `read` looks at each thread of each descendant: it takes 7 ms of CPU time beside two servers
        and a browser, and most tests take less.
        """
        with self._lock:
            return self._total_s + time.process_time() - self._own_s


class HangGuard:
    """A pytest plugin. A thread watches the running test and ends it with a failure.

    If the main thread does not raise the failure, because it waits in native code, the process
    ends. The stacks of all threads are then on standard error.

    _running: the name and limits of the running test; None between two tests.
    """

    def __init__(self, limits_of: Callable[[pytest.Item], HangLimits]) -> None:
        """limits_of: gives the limits of a test."""
        self._limits_of = limits_of
        self._meter = CpuMeter()
        self._running: tuple[str, HangLimits] | None = None
        self._reason = ""
        self._raised = threading.Event()
        self._times: dict[str, float] = {}
        self._stderr_fd = os.dup(2)  # pytest redirects 2 while a test runs
        signal.signal(_SIGNAL, self._raise)
        threading.Thread(target=self._watch, name="hang guard", daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[_BEGAN] = self._meter.read_own(), time.monotonic()
        self._running = item.nodeid, self._limits_of(item)
        try:
            return (yield)
        finally:
            self._running = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            began_cpu_s, began_s = item.stash[_BEGAN]
            is_short = time.monotonic() - began_s < _SHORT_S
            now_s = self._meter.read_own() if is_short else self._meter.read()
            used_s = max(0.0, now_s - began_cpu_s)
            item.user_properties.append((_CPU_S, round(used_s, 2)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the CPU time of a test. With xdist, the reports of all workers arrive here."""
        for name, value in report.user_properties:
            if name == _CPU_S and isinstance(value, float):
                self._times[report.nodeid] = value

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the CPU seconds of each test of this run, the largest first."""
        if self._times and not hasattr(session.config, "workerinput"):
            path = session.config.rootpath / "build" / "test-times.json"
            path.parent.mkdir(exist_ok=True)
            ordered = dict(sorted(self._times.items(), key=lambda entry: -entry[1]))
            path.write_text(json.dumps(ordered, indent=0) + "\n")

    def _watch(self) -> None:
        watched, started_s, idle_since_s, idle_at_s = None, 0.0, 0.0, 0.0
        while True:
            time.sleep(_SAMPLE_S)
            # The time of this thread is no sign of life of the test.
            used_s, now_s = self._meter.read() - time.thread_time(), time.monotonic()
            running = self._running
            if running is None or running is not watched:
                watched, started_s, idle_since_s, idle_at_s = running, now_s, now_s, used_s
                continue
            name, limits = running
            if used_s - idle_at_s >= limits.cpu_s:
                idle_since_s, idle_at_s = now_s, used_s
            problem = ""
            if now_s - idle_since_s > limits.idle_s:
                problem = f"used less than {limits.cpu_s:g} s of CPU time in {limits.idle_s:g} s"
            elif now_s - started_s > limits.total_s:
                problem = f"took more than {limits.total_s:g} s"
            if problem:
                self._end(f"{name} {problem}")
                watched = None  # The teardown of the test has the same limits.

    def _end(self, reason: str) -> None:
        self._reason = reason
        self._raised.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        if not self._raised.wait(_ANSWER_S):
            os.write(self._stderr_fd, f"\n{reason}\n".encode())
            faulthandler.dump_traceback(self._stderr_fd)
            os._exit(1)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        self._raised.set()
        if self._running is None:
            return  # the test has just ended
        stacks = (
            f"thread {thread_id}:\n{''.join(traceback.format_stack(stack))}"
            for thread_id, stack in sys._current_frames().items()
        )
        pytest.fail("\n".join((self._reason, *stacks)), pytrace=False)
