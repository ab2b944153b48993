"""Run one function on several ranks, each in a process of its own."""

import faulthandler
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from minisgl.distributed.comm import Communicator, TPInfo, connect
from minisgl.message.queues import close_queues
from minisgl.utils.process import write_socket_key
from tests.forks import fork_server
from tests.patience import patience

__all__ = ["run_ranks"]

_OTHERS_S = 5.0  # after the failure of a rank, the time in which others may report theirs


def _rank_main(
    function: Callable[..., Any],
    tp: TPInfo,
    folder: Path,
    device: str,
    args: tuple[Any, ...],
    out: Connection,
) -> None:
    torch.set_num_threads(1)
    comm: Communicator | None = None
    with _stacks(folder, tp.rank).open("w") as stacks:
        faulthandler.enable(stacks)  # also for crashes in native code
        try:
            where = torch.device(device, tp.rank) if device == "cuda" else torch.device(device)
            comm = connect(tp, where, str(folder / "rendezvous"), timeout_s=60)
            out.send((None, function(comm, *args)))
        except Exception:  # noqa: BLE001 (handed to the test)
            out.send((traceback.format_exc(), None))
        finally:
            if comm is not None:
                comm.close()
            close_queues()
            faulthandler.disable()


def run_ranks(
    size: int, folder: Path, function: Callable[..., Any], *args: Any, device: str = "cpu"
) -> list[Any]:
    """Call function(comm, *args) on each rank, and return the results in rank order.

    Results must not hold tensors, because their memory ends with the rank's process. The failure of
    a rank, or its end without a result, ends all ranks. The message has the error of each failed
    rank, and the stacks of each rank that was still running.
    """
    # A process that has CUDA's libraries loaded may not fork.
    context = fork_server() if device == "cpu" else multiprocessing.get_context("spawn")
    write_socket_key(folder)  # For functions that use queues between the ranks.
    processes: list[BaseProcess] = []
    inputs: list[Connection] = []
    try:
        for rank in range(size):
            receiver, sender = context.Pipe(duplex=False)
            inputs.append(receiver)
            task = (function, TPInfo(rank, size), folder, device, args, sender)
            process = context.Process(target=_rank_main, args=task)
            processes.append(process)
            process.start()
            sender.close()  # The end of the rank now ends the pipe.
        return _collect(processes, inputs, folder)
    finally:
        for process in processes:
            process.kill()
        for receiver in inputs:
            receiver.close()


def _collect(processes: list[BaseProcess], inputs: list[Connection], folder: Path) -> list[Any]:
    """Return the results of all ranks, or raise AssertionError with the state of every rank."""
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    silent: dict[Any, int] = {receiver: rank for rank, receiver in enumerate(inputs)}
    ends_at = time.monotonic() + patience(240)
    while silent and (ready := wait(silent, max(0.0, ends_at - time.monotonic()))):
        for receiver in ready:
            rank = silent.pop(receiver)
            try:
                error, results[rank] = receiver.recv()
            except EOFError:
                error = "ended without a result"
            if error is not None:
                errors[rank] = error
        if errors:
            ends_at = min(ends_at, time.monotonic() + _OTHERS_S)
    errors |= dict.fromkeys(silent.values(), "no result when the time was over")
    time_to_end = 0.0 if errors else patience(60)
    ends = [_end(process, time_to_end) for process in processes]
    if errors or any(ends):
        for rank, status in enumerate(ends):
            said = errors.get(rank, "gave a result")
            stacks = _stacks(folder, rank).read_text() if _stacks(folder, rank).exists() else ""
            errors[rank] = f"rank {rank} (exit status {status}): {said}\n{stacks}"
        raise AssertionError("\n".join(errors[rank] for rank in range(len(ends))))
    return [results[rank] for rank in range(len(processes))]


def _end(process: BaseProcess, time_s: float) -> int | None:
    """Return the exit status of a rank. A rank that does not end in time writes its stacks."""
    process.join(time_s)
    if process.is_alive() and process.pid is not None:
        os.kill(process.pid, signal.SIGABRT)
        process.join(_OTHERS_S)
    return process.exitcode


def _stacks(folder: Path, rank: int) -> Path:
    """Return the file for the stacks of a rank that crashes or is aborted."""
    return folder / f"rank-{rank}.stacks"
