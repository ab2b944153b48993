"""Runs `python -m` and `python -c` in forks of a process that has imported the large libraries.

Each worker of pytest has one such process, the fork server. The imports take two thirds of the CPU
time of a server's start: 1.1 s in the scheduler, and 0.4 s in the API server. A test of the start
itself, of the environment at an import, or of the libraries or the memory of a process must start
it as users do.
"""

import contextlib
import ctypes
import gc
import inspect
import logging
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import pytest

from minisgl.utils import supervise

__all__ = ["ForkedProcess", "fork_server", "run_forked"]

# The imports of the ranks of a test, of a server's processes and of their stubs.
_IMPORTS = [
    "pytest",
    "tests.parity.rank_cases",
    "tests.unit.structured.grammars",
    "minisgl.drafts",
    "minisgl.llm",
    "minisgl.kv_events.publisher",
    "minisgl.launch.launcher",
    "minisgl.quantization",
    "minisgl.scheduler.process",
    "minisgl.server.process",
    "minisgl.settings.resolve",
    "minisgl.structured.service",
    "minisgl.tool_calls.formats",
]
_PR_SET_NAME = 15
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGHUP)


def fork_server() -> ForkServerContext:
    """Return the context of this worker's fork server, which the first call starts."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    with pytest.MonkeyPatch.context() as patch:
        # libgomp reads these variables when it loads.
        for name, value in supervise.CHILD_ENV_DEFAULTS.items():
            patch.setenv(name, os.environ.get(name, value))
        forkserver.ensure_running()
    return context


class ForkedProcess:
    """`python -m` or `-c` in a fork. It has the attributes of subprocess.Popen that tests use.

    The processes that the module starts with `python -m` are forks as well. The names of workers
    stand in /proc/PID/comm, because all forks have the command line of the fork server.
    """

    def __init__(
        self,
        words: Sequence[str],
        out: Path,
        err: Path,
        environ: Mapping[str, str],
        max_files: int | None,
    ) -> None:
        """words: as for run_forked. out, err: files for the output.

        max_files: hard limit of open files of each process; None: that of this process.
        """
        for path in (out, err):
            path.touch()  # The fork opens them later than the caller may read them.
        folder = os.getcwd()
        args = (list(words), str(out), str(err), dict(environ), folder, max_files)
        self.args = [sys.executable, *(() if words[0] == "-c" else ("-m",)), *words]
        self._process: BaseProcess = fork_server().Process(target=_main, args=args)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # The fork server reaps an ended process shortly before it reports the exit code.
        with contextlib.suppress(ProcessLookupError):
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    words: Sequence[str], timeout: float, environ: Mapping[str, str] = MappingProxyType({})
) -> "subprocess.CompletedProcess[str]":
    """Do as subprocess.run for `python -m` or `python -c`, with standard input at its end.

    words: the module and its arguments, or -c and the code. environ: variables in addition to those
    of this process.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-test-") as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = ForkedProcess(words, out, err, {**os.environ, **environ}, None)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())


def _main(
    words: list[str],
    out: str,
    err: str,
    environ: dict[str, str],
    folder: str,
    max_files: int | None,
) -> NoReturn:
    """Run a module in this fork of the fork server."""

    def prepare() -> None:
        gc.freeze()  # A collection would read, and so copy, the objects of all imports.
        for path, fd in ((out, 1), (err, 2)):
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, fd)
            os.close(file)
        if max_files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))
        os.chdir(folder)
        _set_environ(environ)
        subprocess.Popen = _ForkingPopen  # type: ignore[misc]

    _run_module(prepare, words)


class _ForkingPopen(subprocess.Popen):  # type: ignore[type-arg]
    """subprocess.Popen that runs `python -m` in a fork of this process."""

    def _execute_child(self, *args: Any) -> None:
        start = super()._execute_child  # type: ignore[misc]
        given = inspect.signature(start).bind(*args).arguments
        words = given["args"]
        if list(words[:2]) != [sys.executable, "-m"]:
            start(*args)
            return
        # A signal between the fork and the new handlers would reach the handlers of the parent.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            _run_module(lambda: _become_child(given, mask), words[2:])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._child_created = True
        for ours, theirs in (
            ("p2cwrite", "p2cread"),
            ("c2pread", "c2pwrite"),
            ("errread", "errwrite"),
        ):
            if given[ours] >= 0:  # a pipe
                os.close(given[theirs])


def _become_child(given: Mapping[str, Any], mask: set[Any]) -> None:
    """Give a new fork what subprocess gives a new child.

    given: the arguments of Popen._execute_child. mask: the blocked signals of the parent.
    """
    if given["process_group"] >= 0:
        os.setpgid(0, given["process_group"])
    signal.set_wakeup_fd(-1)
    for number in _HANDLED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # The thread that writes the lines of the parent's handler is not in this process.
    logging.root.handlers.clear()
    logging._handlerList.clear()  # type: ignore[attr-defined]
    for fd, target in ((given["p2cread"], 0), (given["c2pwrite"], 1), (given["errwrite"], 2)):
        if fd >= 0:
            os.dup2(fd, target)
    _close_all_but({0, 1, 2, *given["pass_fds"]})
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (open as long as the process)
    if given["cwd"] is not None:
        os.chdir(given["cwd"])
    if given["preexec_fn"] is not None:
        given["preexec_fn"]()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _set_environ(os.environ.copy() if given["env"] is None else given["env"])
    # The last two words of a worker are its role and the pid of its parent.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, given["args"][-2].encode(), 0, 0, 0)


def _close_all_but(kept: set[int]) -> None:
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in kept:
            with contextlib.suppress(OSError):  # the descriptor of the listing
                os.close(fd)


def _set_environ(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # It may be that of the fork server.


def _run_module(prepare: Callable[[], None], words: Sequence[str]) -> NoReturn:
    """Call `prepare`, do as `python -m`, and end this process.

    The exit handlers of the fork server do not run.
    """
    code = 1
    try:
        prepare()
        sys.argv[:] = words
        if words[0] == "-c":
            exec(words[1], {"__name__": "__main__"})  # noqa: S102 (a test gives the code)
        else:
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 (the outermost handler of the process)
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the reader has gone
            stream.flush()
    os._exit(code)
