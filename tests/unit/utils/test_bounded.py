"""BoundedProcess: the limits of a call, and the ends of its processes."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import pytest

from minisgl.utils.bounded import BoundedProcess, Bounds
from tests.patience import patience

FREE = Bounds(cpu_s=10.0, memory_bytes=2**30)


def spin(raw: bytes) -> bytes:
    """Work for as many seconds of CPU time as the text says, then return the process id."""
    end_s = time.process_time() + float(raw)
    while time.process_time() < end_s:
        pass
    return str(os.getpid()).encode()


def test_call_over_its_cpu_time_is_ended_and_the_next_one_works() -> None:
    process = BoundedProcess("spin", spin, Bounds(0.1, 2**30))
    first = process.call(b"0")
    assert process.call(b"0") == first, "one process serves all calls"
    assert process.call(b"60") is signal.SIGPROF
    assert process.call(b"0") not in (first, signal.SIGPROF)
    process.close()


def test_limit_holds_for_each_call_and_not_for_their_sum() -> None:
    process = BoundedProcess("spin", spin, Bounds(0.09, 2**29))
    assert len({process.call(b"0.03") for _ in range(8)}) == 1
    process.close()


def hold(raw: bytes) -> bytes:
    """Take as much memory as the text says, and return the process id."""
    bytearray(int(raw))
    return str(os.getpid()).encode()


def test_call_over_its_memory_is_ended_and_the_next_one_works() -> None:
    process = BoundedProcess("hold", hold, Bounds(10.0, 2**26))
    first = process.call(b"1000")
    assert process.call(b"30000000") == first
    # More than the free memory that the process inherits from this one.
    assert process.call(b"8000000000") is signal.SIGABRT
    assert process.call(b"30000000") not in (first, signal.SIGABRT)
    process.close()


def test_memory_that_past_calls_keep_is_not_missing_in_later_calls() -> None:
    kept: list[bytearray] = []
    process = BoundedProcess(
        "keep", lambda raw: kept.append(bytearray(int(raw))) or b"x", Bounds(10, 2**27)
    )
    assert [process.call(b"20000000") for _ in range(20)] == [b"x"] * 20
    process.close()


def pids(raw: bytes) -> bytes:
    """Return the text, the id of this process, and that of its parent."""
    return raw + f" {os.getpid()} {os.getppid()}".encode()


def test_death_of_an_idle_process_does_not_shift_the_replies() -> None:
    """Regression: each later call got the reply of the call before it."""
    process = BoundedProcess("pids", pids, FREE)
    reply = process.call(b"first")
    for text in (b"second", b"third"):
        assert isinstance(reply, bytes)
        os.kill(int(reply.split()[1]), signal.SIGKILL)
        reply = process.call(text)
        # SIGKILL: the process ended after its parent had passed the request on.
        assert reply is signal.SIGKILL or reply.startswith(text)
        reply = process.call(text)
        assert isinstance(reply, bytes)
        assert reply.startswith(text)
    process.close()


def test_call_that_waits_without_cpu_time_is_given_up_and_the_next_one_works() -> None:
    """Regression: a blocked process for images held all later chats with images, without an end."""

    def wait(raw: bytes) -> bytes:
        if raw == b"wait":
            signal.pause()
        return raw

    process = BoundedProcess("wait", wait, FREE._replace(wall_s=patience(1.0)))
    with pytest.raises(TimeoutError, match="wait has not replied for"):
        process.call(b"wait")
    assert process.call(b"next") == b"next"
    process.close()


def test_death_of_the_parent_is_an_error_and_the_next_call_works() -> None:
    process = BoundedProcess("the process of pids", pids, FREE)
    first = process.call(b"first")
    assert isinstance(first, bytes)
    os.kill(int(first.split()[2]), signal.SIGKILL)
    with pytest.raises(EOFError, match="the process of pids has ended"):
        process.call(b"second")
    third = process.call(b"third")
    assert isinstance(third, bytes)
    assert not set(first.split()) & set(third.split())
    process.close()


class Interrupt(Exception):
    """Raised by the handler of a signal."""


def test_interrupted_call_ends_its_process_and_the_next_call_works(tmp_path: Path) -> None:
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    working: list[int] = []

    def work(raw: bytes) -> bytes:
        if raw == b"pause":
            fifo.write_text(str(os.getpid()))
            signal.pause()
        return raw * 2

    def interrupt() -> None:
        working.append(int(fifo.read_text()))
        os.kill(os.getpid(), signal.SIGUSR1)

    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupt

    process = BoundedProcess("work", work, FREE)
    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(Interrupt):
        process.call(b"pause")
    thread.join()
    signal.signal(signal.SIGUSR1, before)
    with pytest.raises(ProcessLookupError):
        os.kill(working[0], 0)
    assert process.call(b"next") == b"nextnext"
    process.close()


def test_large_requests_and_replies_pass() -> None:
    process = BoundedProcess("double", lambda raw: raw * 2, FREE)
    assert process.call(b"x" * 2**20) == b"x" * 2**21
    process.close()


def test_processes_end_with_close() -> None:
    process = BoundedProcess("pids", pids, FREE)
    reply = process.call(b"x")
    assert isinstance(reply, bytes)
    process.close()
    for pid in reply.split()[1:]:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


_OWNER = """
import os, signal
from minisgl.utils.bounded import BoundedProcess, Bounds

def work(raw: bytes) -> bytes:
    os.write(1, b"at work")
    signal.pause()

BoundedProcess("work", work, Bounds(10.0, 2**30)).call(b"x")
"""


def test_processes_at_work_end_with_a_killed_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    with owner, owner.stdout as output:
        assert output.read(7) == b"at work"
        owner.kill()
        assert output.read() == b"", "the end arrives when no process holds the output"


def test_failure_of_the_process_is_an_error_of_the_owner(capfd: pytest.CaptureFixture[str]) -> None:
    process = BoundedProcess("the process for x", lambda raw: bytes("x", "x"), FREE)  # LookupError
    with pytest.raises(EOFError, match="the process for x has ended"):
        process.call(b"x")
    process.close()
    assert "LookupError" in capfd.readouterr().err


_NO_FORK = """
import os, sys
from minisgl.utils.bounded import BoundedProcess, Bounds
fork, owner, forks = os.fork, os.getpid(), int(sys.argv[1])

def limited() -> int:
    global forks
    if os.getpid() != owner:
        if not forks:
            raise BlockingIOError("the limit of processes is reached")
        forks -= 1
    return fork()

os.fork = limited
try:
    process = BoundedProcess("the pid", lambda raw: str(os.getpid()).encode(), Bounds(10.0, 2**30))
    while isinstance(reply := process.call(b"x"), bytes):
        os.kill(int(reply), 9)
    process.call(b"x")
except EOFError as error:
    print(error)
finally:
    print("the owner")
"""


@pytest.mark.parametrize("forks", [0, 1])
def test_failed_fork_is_an_error_of_the_owner_alone(forks: int) -> None:
    """Regression: the fork that failed went on with the code of its owner."""
    command = [sys.executable, "-c", _NO_FORK, str(forks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience())
    lines = done.stdout.splitlines()
    assert (len(lines), lines[-1]) == (2, "the owner"), done.stdout + done.stderr
    assert lines[0].startswith("the pid has ended")
    assert done.stderr.count("BlockingIOError: the limit of processes is reached") == 1
