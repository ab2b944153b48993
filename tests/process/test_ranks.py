"""Tensor-parallel ranks over gloo.

A rank that dies, hangs or runs out of memory ends the service, with a reason. No socket of a rank
can be reached from outside the host.
"""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import pytest

from minisgl.core import ConfigError, SamplingParams, WorkerDied
from minisgl.llm import LLM, Completion
from minisgl.llm.workers import RankWorkers
from minisgl.message.messages import AddReq, StepOutput
from minisgl.message.queues import Receiver
from tests.forks import run_forked
from tests.patience import patience
from tests.process.harness import (
    ServerProcess,
    assert_told,
    run_server,
    start_long_stream,
    wait_for,
)

pytestmark = pytest.mark.process

RANKS = ["scheduler", "scheduler-1"]
FLAGS = ("--num-pages", "256", "--tp", "2")


@contextlib.contextmanager
def serving(model: Path) -> Iterator[ServerProcess]:
    with run_server("--model", str(model), *FLAGS, "--step-timeout", "2") as server:
        yield server.wait_ready()


def ask(server: ServerProcess, prompt: str | list[int] = "hi", model: str = "tiny") -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 3}
    return httpx.post(server.url + "/v1/completions", json=body, timeout=patience()).status_code


LONG_PROMPT = [7] * 3000  # its attention allocates 72 MB at once, on the demo model with two ranks


def leave_no_memory(pid: int) -> None:
    """Deny the process more address space, so that its next large allocation fails."""
    resource.prlimit(pid, resource.RLIMIT_AS, (1, 1))


def assert_all_end(server: ServerProcess, reason: str) -> None:
    pids = list(server.child_pids().values())
    assert server.wait_exit() == 1
    wait_for(lambda: not any(psutil.pid_exists(pid) for pid in pids), "the end of the children")
    assert reason in server.stderr


def test_rank_0_without_memory_ends_the_service() -> None:
    """test_a_rank_without_memory_raises_worker_died has rank 1."""
    with run_server(*FLAGS) as server:
        leave_no_memory(server.wait_ready().child_pid("scheduler"))
        assert ask(server, LONG_PROMPT, "minisgl-demo") in (500, 503)
        assert_all_end(server, "error: scheduler: ")


@pytest.mark.parametrize("rank", RANKS)
def test_a_rank_lost_before_the_ranks_meet_ends_the_service(rank: str) -> None:
    """Without a check, the other rank would wait at the rendezvous for ten minutes."""
    with run_server(*FLAGS, fresh=True) as server:
        os.kill(server.child_pid(rank), signal.SIGKILL)
        assert_all_end(server, f"error: {rank} (pid ")


def hang(server: ServerProcess, rank: str) -> None:
    """Stop one rank. The other rank waits in a collective operation and is ended too."""
    os.kill(server.child_pid(rank), signal.SIGSTOP)
    assert ask(server) in (500, 503)
    assert_all_end(server, "no progress")


@pytest.mark.parametrize("rank", RANKS)
def test_only_loopback_is_listened_on_and_a_rank_that_hangs_ends_the_service(
    rank: str, tiny_model: Path
) -> None:
    with serving(tiny_model) as server:
        assert_only_loopback(server)
        hang(server, rank)


def assert_only_loopback(server: ServerProcess) -> None:
    found = {
        name: {
            connection.laddr.ip
            for connection in psutil.Process(pid).net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        }
        for name, pid in server.child_pids().items()
    }
    assert found.pop("api") == {"127.0.0.1"}
    ranks = set().union(*found.values())
    assert ranks <= {"127.0.0.1", "::1"}
    assert found["scheduler"] or found["scheduler-1"], (
        "gloo must listen, otherwise this test checks no socket"
    )
    peers = {
        connection.raddr.ip
        for name in RANKS
        for connection in psutil.Process(server.child_pid(name)).net_connections(kind="inet")
        if connection.raddr
    }
    assert peers <= {"127.0.0.1", "::1"}


def run_with_llm(function: Callable[[LLM], None]) -> None:
    """Call the function with an LLM of two ranks, in a fork: its ranks are then forks as well."""
    code = (
        f"from minisgl.llm import LLM\nfrom {function.__module__} import {function.__name__}\n"
        f"with LLM(tp=2, num_pages=256) as llm: {function.__name__}(llm)"
    )
    done = run_forked(["-c", code], patience(120))
    assert done.returncode == 0, done.stderr


def test_an_llm_with_ranks_generates_aborts_and_refuses() -> None:
    run_with_llm(generate_abort_and_refuse)


def generate_abort_and_refuse(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    for max_tokens in (900, 1):  # left in the middle, and after the last output
        for _ in llm.stream([5, 6, 7], SamplingParams(max_tokens=max_tokens, ignore_eos=True)):
            break
    stream = llm.stream([5, 6, 7], SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    again = patch.object(llm.worker, "step", side_effect=KeyboardInterrupt)
    with again, pytest.raises(KeyboardInterrupt):  # Ctrl-C again, during the abort after the first
        stream.close()
    answer = llm.chat([{"role": "user", "content": "What is 12 + 30?"}], greedy, progress=False)
    assert isinstance(answer, Completion)
    assert answer.text == "42"
    with pytest.raises(ConfigError, match="cannot be split over tensor-parallel 3"):
        LLM(tp=3, num_pages=256)


def test_a_keyboard_interrupt_loses_no_output_of_the_ranks() -> None:
    """Regression: output that came with the interrupt was lost, and the LLM waited for it."""
    run_with_llm(interrupt)


def interrupt(llm: LLM) -> None:
    drain: Callable[[Receiver[Any]], Iterator[Any]] = Receiver.drain

    def interrupted(receiver: Receiver[Any]) -> Iterator[Any]:
        for message in drain(receiver):
            if isinstance(message, StepOutput) and message.finished:
                signal.raise_signal(signal.SIGINT)
            yield message

    assert isinstance(llm.worker, RankWorkers)
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # SIGINT is ignored in a background process
    sampling = SamplingParams(max_tokens=1)
    llm.worker.send(AddReq(uid=99, token_ids=array("i", [5, 6]).tobytes(), sampling=sampling))
    with patch.object(Receiver, "drain", interrupted), pytest.raises(KeyboardInterrupt):
        list(iter(llm.worker.step, None))  # an endless loop: step never returns None
    signal.signal(signal.SIGINT, before)
    assert not llm.worker._unfinished


def assert_ended_by(llm: LLM, end: Callable[[int], None], prompt: list[int], begun: bool) -> None:
    """The end of rank 1 raises WorkerDied in every call, and close() then leaves no process.

    end: ends the process of rank 1. begun: the call has had output before.
    """
    assert isinstance(llm.worker, RankWorkers)
    ranks = {each.role: psutil.Process(each.process.pid) for each in llm.worker.children}
    assert list(ranks) == RANKS
    greedy = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    stream = llm.stream([prompt], greedy)
    if begun:
        next(stream)
    end(ranks["scheduler-1"].pid)
    with pytest.raises(WorkerDied, match="scheduler-1"):
        list(stream)
    with pytest.raises(WorkerDied):
        llm.generate([5], greedy, progress=False)
    llm.close()
    assert not [rank for rank in ranks.values() if rank.is_running()]


def kill_a_rank(llm: LLM) -> None:
    assert_ended_by(llm, lambda pid: os.kill(pid, signal.SIGKILL), [5, 6, 7], begun=True)


def test_a_killed_rank_ends_its_llm_or_its_service_and_changes_no_other_ranks(
    tiny_model: Path,
) -> None:
    """The other rank waits in a collective operation for the lost one, and is ended too."""
    with serving(tiny_model) as server:
        assert ask(server) == 200
        run_with_llm(kill_a_rank)
        assert ask(server) == 200
        streams = [start_long_stream(server) for _ in range(2)]
        os.kill(server.child_pid("scheduler-1"), signal.SIGKILL)
        assert_all_end(server, "error: scheduler-1 (pid ")
        for stream in streams:
            assert_told(stream, lost=False)


@pytest.mark.proof
def test_a_rank_without_memory_raises_worker_died() -> None:
    assert_ended_by(LLM(tp=2, num_pages=256), leave_no_memory, LONG_PROMPT, begun=False)


@pytest.mark.proof  # four ranks in new interpreters take 12 s of CPU time
def test_an_llm_that_is_not_closed_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    """The ranks end when the LLM is garbage-collected, or when the caller's process ends."""
    lines = [
        "import os, psutil",
        "from minisgl.llm import LLM",
        "first, second = LLM(tp=2, num_pages=256), LLM(tp=2, num_pages=256)",
        "left = lambda: (os.listdir(os.environ['TMPDIR']), psutil.Process().children())",
        "both = left()",
        "del first",
        "assert [2 * len(some) for some in left()] == [*map(len, both)], (both, left())",
        "assert all(left())",
    ]
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], env=environ, check=True, timeout=patience(120)
    )
    assert os.listdir(tmp_path) == []
